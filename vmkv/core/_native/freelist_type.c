/* class FreeList: the Python face of freelist.h.
 *
 * All that happens here is checking arguments and turning answers into objects.  The GIL stays
 * held: a call is shorter than giving the GIL up and taking it back.  Nothing relies on it though;
 * on a free-threaded Python the same code runs from many threads at once.
 */
#include "module.h"

#include "freelist.h"

typedef struct {
    PyObject_HEAD
    vmkv_freelist *list;
} free_list_object;

static vmkv_freelist *list_of(PyObject *self) { return ((free_list_object *)self)->list; }

/* Reads an int in [0, limit).  A value outside raises ValueError, however large it is. */
static int parse_below(PyObject *object, const char *name, uint32_t limit, uint32_t *result)
{
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (overflow != 0 || value < 0 || value >= (long long)limit) {
        PyErr_Format(PyExc_ValueError, "%s must be in 0..%lu, got %R", name,
                     (unsigned long)limit - 1, object);
        return -1;
    }
    *result = (uint32_t)value;
    return 0;
}

static PyObject *free_list_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", "num_classes", NULL};
    PyObject *capacity_object, *num_classes_object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:FreeList", names, &capacity_object,
                                     &num_classes_object))
        return NULL;
    int overflow;
    long long capacity = PyLong_AsLongLongAndOverflow(capacity_object, &overflow);
    if (capacity == -1 && PyErr_Occurred())
        return NULL;
    if (overflow != 0 || capacity < 1 || capacity > (long long)VMKV_FREELIST_CAPACITY_MAX)
        return PyErr_Format(PyExc_ValueError, "capacity must be in 1..2**31, got %R",
                            capacity_object);
    long long num_classes = PyLong_AsLongLongAndOverflow(num_classes_object, &overflow);
    if (num_classes == -1 && PyErr_Occurred())
        return NULL;
    if (overflow != 0 || num_classes < 1 || num_classes > (long long)VMKV_FREELIST_CLASSES_MAX)
        return PyErr_Format(PyExc_ValueError, "num_classes must be in 1..64, got %R",
                            num_classes_object);

    allocfunc tp_alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    vmkv_freelist *list = vmkv_freelist_new((uint32_t)capacity, (uint32_t)num_classes);
    ((free_list_object *)self)->list = list;
    if (list == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return self;
}

static void free_list_dealloc(PyObject *self)
{
    vmkv_freelist_delete(list_of(self));
    vmkv_free_instance(self);
}

static PyObject *free_list_push(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    vmkv_freelist *list = list_of(self);
    if (num_args != 2)
        return PyErr_Format(PyExc_TypeError, "push() takes size_class and extent_id, got %zd "
                            "arguments", num_args);
    uint32_t size_class, id;
    if (parse_below(args[0], "size_class", list->num_classes, &size_class) < 0)
        return NULL;
    if (parse_below(args[1], "extent_id", list->capacity, &id) < 0)
        return NULL;
    switch (vmkv_freelist_push(list, size_class, id)) {
    case VMKV_PUSH_OK:
        Py_RETURN_NONE;
    case VMKV_PUSH_ALREADY_LISTED:
        return PyErr_Format(PyExc_ValueError, "extent %lu was pushed twice: it is already free",
                            (unsigned long)id);
    case VMKV_PUSH_NEVER_ISSUED:
        break;
    }
    return PyErr_Format(PyExc_ValueError, "extent %lu was never issued: bump() gave out %lu of %lu",
                        (unsigned long)id, (unsigned long)vmkv_freelist_num_issued(list),
                        (unsigned long)list->capacity);
}

static PyObject *free_list_pop(PyObject *self, PyObject *size_class_object)
{
    vmkv_freelist *list = list_of(self);
    uint32_t size_class, id;
    if (parse_below(size_class_object, "size_class", list->num_classes, &size_class) < 0)
        return NULL;
    if (!vmkv_freelist_pop(list, size_class, &id))
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(id);
}

static PyObject *free_list_take(PyObject *self, PyObject *size_classes_object)
{
    enum { NUM_ON_STACK = 64 };
    vmkv_freelist *list = list_of(self);
    uint32_t on_stack[2 * NUM_ON_STACK], *size_classes = on_stack;
    PyObject *result = NULL;
    PyObject *wanted = PySequence_Tuple(size_classes_object); /* nobody changes it meanwhile */
    if (wanted == NULL)
        return NULL;
    Py_ssize_t num_wanted = PyTuple_Size(wanted);
    if (num_wanted > NUM_ON_STACK)
        size_classes = PyMem_Malloc(2 * (size_t)num_wanted * sizeof *size_classes);
    if (size_classes == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    uint32_t *ids = size_classes + num_wanted;
    for (Py_ssize_t i = 0; i < num_wanted; i++) {
        PyObject *size_class = PyTuple_GetItem(wanted, i);
        if (parse_below(size_class, "size_class", list->num_classes, &size_classes[i]) < 0)
            goto end;
    }
    /* Made first: what is taken could not be told if there were no memory for it. */
    PyObject *taken = PyList_New(num_wanted);
    if (taken == NULL)
        goto end;
    if (!vmkv_freelist_take(list, size_classes, (size_t)num_wanted, ids)) {
        Py_DECREF(taken);
        result = Py_None;
        Py_INCREF(result);
        goto end;
    }
    for (Py_ssize_t i = 0; i < num_wanted; i++) {
        PyObject *id = PyLong_FromUnsignedLong(ids[i]);
        if (id == NULL) {
            while (num_wanted-- > 0)
                vmkv_freelist_push(list, size_classes[num_wanted], ids[num_wanted]);
            Py_DECREF(taken);
            goto end;
        }
        PyList_SetItem(taken, i, id);
    }
    result = taken;
end:
    if (size_classes != on_stack)
        PyMem_Free(size_classes);
    Py_DECREF(wanted);
    return result;
}

static PyObject *free_list_bump(PyObject *self, PyObject *Py_UNUSED(unused))
{
    uint32_t id;
    if (!vmkv_freelist_bump(list_of(self), &id))
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(id);
}

static PyObject *free_list_count(PyObject *self, PyObject *size_class_object)
{
    vmkv_freelist *list = list_of(self);
    uint32_t size_class;
    if (parse_below(size_class_object, "size_class", list->num_classes, &size_class) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(vmkv_freelist_count(list, size_class));
}

static PyObject *get_capacity(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(list_of(self)->capacity);
}

static PyObject *get_num_classes(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(list_of(self)->num_classes);
}

static PyObject *get_num_issued(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(vmkv_freelist_num_issued(list_of(self)));
}

static PyMethodDef methods[] = {
    {"push", (PyCFunction)(void (*)(void))free_list_push, METH_FASTCALL,
     "push($self, size_class, extent_id, /)\n--\n\nGive an extent back to its size class."},
    {"pop", free_list_pop, METH_O,
     "pop($self, size_class, /)\n--\n\nTake a free extent of this size class, or None."},
    {"take", free_list_take, METH_O,
     "take($self, size_classes, /)\n--\n\nTake a free extent of each size class, or None."},
    {"bump", free_list_bump, METH_NOARGS,
     "bump($self, /)\n--\n\nIssue the next id never issued before, or None."},
    {"count", free_list_count, METH_O,
     "count($self, size_class, /)\n--\n\nHow many extents of this size class are free."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"capacity", get_capacity, NULL, "How many ids there are in all.", NULL},
    {"num_classes", get_num_classes, NULL, "How many size classes there are.", NULL},
    {"num_issued", get_num_issued, NULL, "How many ids bump() has given out.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "FreeList(capacity, num_classes)\n--\n\n"
                "Free extents, by size class: a lock-free stack for each."},
    {Py_tp_new, free_list_new},
    {Py_tp_dealloc, free_list_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec vmkv_free_list_spec = {
    .name = "vmkv.core._native._core.FreeList",
    .basicsize = sizeof(free_list_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
