/* class References: who needs an extent, counted in one atomic word; count_references: in bulk.
 *
 *     bits 0-20   owners
 *     bits 21-41  live mappings
 *     bits 42-62  mappings, retired ones included
 *
 * One word, because whoever takes away the last reference must be one caller, whatever kind it is
 * of: each change is one compare-and-swap, and the word becomes zero in exactly one of them.  That
 * one has release order for what it wrote about the extent, and acquire for what all before did.
 */
#include "module.h"

#include <stdatomic.h>

enum { OWNERS = 0, LIVE = 21, MAPPINGS = 42, COUNT_MAX = (1 << 21) - 1 };

typedef struct {
    PyObject_HEAD
    _Atomic uint64_t counts; /* tp_alloc zeroes it */
} references_object;

static long count_in(uint64_t counts, int shift) { return (long)(counts >> shift & COUNT_MAX); }

static uint64_t counts_of(PyObject *self)
{
    return atomic_load_explicit(&((references_object *)self)->counts, memory_order_acquire);
}

/* The changes that a call asks for, and whether `counts` can take them. */
typedef struct {
    long mappings, live_mappings, owners;
} change;

static int apply(uint64_t counts, const change *by, uint64_t *changed)
{
    long mappings = count_in(counts, MAPPINGS) + by->mappings;
    long live = count_in(counts, LIVE) + by->live_mappings;
    long owners = count_in(counts, OWNERS) + by->owners;
    if (live < 0 || live > mappings || mappings > COUNT_MAX || owners < 0 || owners > COUNT_MAX)
        return -1;
    *changed = (uint64_t)mappings << MAPPINGS | (uint64_t)live << LIVE | (uint64_t)owners;
    return 0;
}

const char vmkv_count_references_doc[] =
    "count_references($module, extents, mappings, live_mappings, owners, /)\n--\n\n"
    "Add to the counts of each; returns those that nobody references any more.";

PyObject *vmkv_count_references(PyObject *module, PyObject *args)
{
    vmkv_module_state *state = PyModule_GetState(module);
    PyObject *given;
    change by;
    if (!PyArg_ParseTuple(args, "Olll:count_references", &given, &by.mappings, &by.live_mappings,
                          &by.owners))
        return NULL;
    PyObject *extents = PySequence_Tuple(given);
    if (extents == NULL)
        return NULL;
    PyObject *unneeded = PyList_New(0);
    Py_ssize_t num_extents = PyTuple_Size(extents);
    for (Py_ssize_t i = 0; unneeded != NULL && i < num_extents; i++) {
        PyObject *extent = PyTuple_GetItem(extents, i);
        int is_one = PyObject_TypeCheck(extent, (PyTypeObject *)state->references_type);
        if (!is_one)
            PyErr_Format(PyExc_TypeError, "%R has no references to count", extent);
        uint64_t counts = is_one ? counts_of(extent) : 0, changed = 0;
        do {
            if (is_one && apply(counts, &by, &changed) < 0) {
                PyErr_Format(PyExc_ValueError,
                             "%R cannot have %ld mappings, %ld live ones and %ld owners more",
                             extent, by.mappings, by.live_mappings, by.owners);
                is_one = 0;
            }
        } while (is_one && !atomic_compare_exchange_weak_explicit(
                               &((references_object *)extent)->counts, &counts, changed,
                               memory_order_acq_rel, memory_order_acquire));
        if (!is_one || (changed == 0 && counts != 0 && PyList_Append(unneeded, extent) < 0))
            Py_CLEAR(unneeded);
    }
    Py_DECREF(extents);
    return unneeded;
}

static PyObject *get_count(PyObject *self, void *shift)
{
    return PyLong_FromLong(count_in(counts_of(self), (int)(intptr_t)shift));
}

static PyObject *get_num_references(PyObject *self, void *Py_UNUSED(closure))
{
    uint64_t counts = counts_of(self);
    return PyLong_FromLong(count_in(counts, MAPPINGS) + count_in(counts, OWNERS));
}

static PyObject *get_is_needed_by_several(PyObject *self, void *Py_UNUSED(closure))
{
    uint64_t counts = counts_of(self);
    return PyBool_FromLong(count_in(counts, LIVE) + count_in(counts, OWNERS) > 1);
}

static PyGetSetDef properties[] = {
    {"num_mappings", get_count, NULL, "Places it is mapped at, retired ones included.",
     (void *)MAPPINGS},
    {"num_live_mappings", get_count, NULL, "Those of them that are not retired.", (void *)LIVE},
    {"num_owners", get_count, NULL, "References that are not mappings.", (void *)OWNERS},
    {"num_references", get_num_references, NULL, "Mappings and owners.", NULL},
    {"is_needed_by_several", get_is_needed_by_several, NULL,
     "Whether live mappings and owners are more than one.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "References()\n--\n\nMappings and owners of an extent, none at first."},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec vmkv_references_spec = {
    .name = "vmkv.core._native._core.References",
    .basicsize = sizeof(references_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
