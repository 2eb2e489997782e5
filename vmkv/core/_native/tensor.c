/* view_capsule(): raw addresses as a DLPack tensor, and ViewCounter: how many such tensors live.
 *
 * A framework that consumes the capsule gets a one-dimensional uint8 tensor over memory that it
 * does not own.  It may drop the tensor on any thread, without the GIL, and after the interpreter
 * has begun to shut down.  So the deleter is plain C: it touches no Python object, and the count it
 * lowers lives in a block of its own that outlives the ViewCounter if need be.
 *
 * One reference count serves both purposes.  The ViewCounter holds one reference to the block, and
 * every view that has not been deleted holds one, so as long as the ViewCounter exists
 *
 *     live == num_refs - 1
 *
 * What is counted: the tensors made by view_capsule, including capsules that nobody has consumed
 * yet.  Slices and reshapes share their base's storage, so the base counts until the last is gone.
 *
 * What is not done: nothing here maps, unmaps, or reads the memory.  A view may be made over
 * addresses with nothing behind them; touching those faults, as it would for the driver.
 */
#include "tensor.h"

#include <stdatomic.h>
#include <stdlib.h>

/* DLPack's DLManagedTensor (the unversioned ABI, which every consumer accepts), written out so that
 * no header is needed.  Field order and sizes are the ABI; the names are ours to shorten. */
typedef struct {
    int32_t type; /* kDLCPU 1, kDLCUDA 2, ... */
    int32_t id;
} dl_device;

typedef struct {
    uint8_t code; /* kDLUInt 1 */
    uint8_t bits;
    uint16_t lanes;
} dl_dtype;

typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed_tensor {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed_tensor *self);
} dl_managed_tensor;

static const char UNCONSUMED[] = "dltensor"; /* a consumer renames the capsule "used_dltensor" */

typedef struct {
    _Atomic uint64_t num_refs;
} shared_count;

typedef struct {
    dl_managed_tensor managed; /* first: the deleter gets its address, and it is ours */
    int64_t shape[1];
    int64_t strides[1];
    shared_count *count;
} view;

/* Relaxed: whoever retains already holds a reference, so the block cannot vanish meanwhile. */
static void retain(shared_count *count)
{
    atomic_fetch_add_explicit(&count->num_refs, 1, memory_order_relaxed);
}

/* Release, so that what a thread did through its view happens before a reader sees the count drop;
 * acquire, so that the last one frees the block after everybody else is done with it. */
static void release(shared_count *count)
{
    if (atomic_fetch_sub_explicit(&count->num_refs, 1, memory_order_acq_rel) == 1)
        free(count);
}

static void delete_view(dl_managed_tensor *managed)
{
    view *self = (view *)managed;
    shared_count *count = self->count;
    free(self);
    release(count); /* last: once the count has dropped, nothing of the view is left */
}

/* Runs when the capsule dies.  A consumed capsule is only a shell: the tensor went elsewhere. */
static void destroy_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, UNCONSUMED))
        delete_view(PyCapsule_GetPointer(capsule, UNCONSUMED));
}

typedef struct {
    PyObject_HEAD
    shared_count *count;
} view_counter_object;

static PyObject *view_counter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":ViewCounter", names))
        return NULL;
    allocfunc tp_alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    shared_count *count = malloc(sizeof *count);
    ((view_counter_object *)self)->count = count;
    if (count == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    atomic_init(&count->num_refs, 1);
    return self;
}

static void view_counter_dealloc(PyObject *self)
{
    shared_count *count = ((view_counter_object *)self)->count;
    if (count != NULL)
        release(count);
    vmkv_free_instance(self);
}

static PyObject *get_live(PyObject *self, void *Py_UNUSED(closure))
{
    shared_count *count = ((view_counter_object *)self)->count;
    /* Acquire pairs with release(): who reads 0 and unmaps does so after the last use. */
    uint64_t num_refs = atomic_load_explicit(&count->num_refs, memory_order_acquire);
    return PyLong_FromUnsignedLongLong(num_refs - 1);
}

static PyGetSetDef properties[] = {
    {"live", get_live, NULL, "How many views made with this counter still live.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "ViewCounter()\n--\n\nCounts the views made by view_capsule() that still live."},
    {Py_tp_new, view_counter_new},
    {Py_tp_dealloc, view_counter_dealloc},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec vmkv_view_counter_spec = {
    .name = "vmkv.core._native._core.ViewCounter",
    .basicsize = sizeof(view_counter_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

const char vmkv_view_capsule_doc[] =
    "view_capsule($module, address, num_bytes, device_type, device_id, counter, /)\n--\n\n"
    "Wrap raw addresses as a DLPack capsule: a one-dimensional uint8 tensor.";

PyObject *vmkv_view_capsule(PyObject *module, PyObject *args)
{
    vmkv_module_state *state = PyModule_GetState(module);
    uint64_t address, num_bytes;
    int device_type, device_id;
    PyObject *counter;
    if (!PyArg_ParseTuple(args, "O&O&iiO!:view_capsule", vmkv_convert_u64, &address,
                          vmkv_convert_u64, &num_bytes, &device_type, &device_id,
                          (PyTypeObject *)state->view_counter_type, &counter))
        return NULL;
    if (num_bytes > INT64_MAX)
        return PyErr_Format(PyExc_ValueError, "num_bytes must be below 2**63, got %llu",
                            (unsigned long long)num_bytes);
    if (address == 0 && num_bytes != 0)
        return PyErr_Format(PyExc_ValueError, "a view of %llu bytes cannot start at address 0",
                            (unsigned long long)num_bytes);

    view *self = malloc(sizeof *self);
    if (self == NULL)
        return PyErr_NoMemory();
    self->shape[0] = (int64_t)num_bytes;
    self->strides[0] = 1;
    self->count = ((view_counter_object *)counter)->count;
    self->managed = (dl_managed_tensor){
        .tensor = {
            .data = (void *)(uintptr_t)address,
            .device = {.type = device_type, .id = device_id},
            .ndim = 1,
            .dtype = {.code = 1, .bits = 8, .lanes = 1},
            .shape = self->shape,
            .strides = self->strides,
            .byte_offset = 0,
        },
        .context = NULL,
        .deleter = delete_view,
    };
    retain(self->count);
    PyObject *capsule = PyCapsule_New(&self->managed, UNCONSUMED, destroy_capsule);
    if (capsule == NULL)
        delete_view(&self->managed);
    return capsule;
}
