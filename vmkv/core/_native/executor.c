/* execute(): a list of map, set-access and unmap calls, in one crossing and outside the GIL.
 * transfer(): likewise a list of copies and fills.
 *
 * Why native: growing a batch by one step is dozens of driver calls of microseconds each.  From
 * Python every one of them would pay for argument conversion and would stop other Python threads.
 *
 * The plan is checked as a whole before the first call, so a malformed plan changes nothing.  After
 * that the records run in order and the first failure ends the run.  Nothing is undone here: the
 * caller knows what `num_done` records mean, and it owns the rollback.
 */
#include "executor.h"

#include <limits.h>
#include <string.h>

enum { OP_MAP = 0, OP_SET_ACCESS = 1, OP_UNMAP = 2, NUM_OPS = 3 };
enum { OP_COPY = 0, OP_FILL = 1, NUM_TRANSFERS = 2 };

typedef struct {
    uint64_t op;
    uint64_t address;
    uint64_t num_bytes;
    uint64_t argument; /* map: handle; set_access: flags; unmap: not looked at; copy: source;
                        * fill: byte */
} record;

_Static_assert(sizeof(record) == 32, "a plan is packed as four uint64 a record");
_Static_assert(sizeof(vmkv_access) == 12, "must equal CUmemAccessDesc");

/* The bytes of a bytes object need not be aligned for a uint64, so records are copied out. */
static record read_record(const char *plan, Py_ssize_t index)
{
    record result;
    memcpy(&result, plan + index * (Py_ssize_t)sizeof(record), sizeof(record));
    return result;
}

/* How many records a plan has, and where they are; sets an error and returns -1 if it is none. */
static Py_ssize_t open_plan(PyObject *plan_object, char **plan)
{
    Py_ssize_t plan_bytes;
    if (PyBytes_AsStringAndSize(plan_object, plan, &plan_bytes) < 0)
        return -1;
    if (plan_bytes % (Py_ssize_t)sizeof(record) != 0) {
        PyErr_Format(PyExc_ValueError, "a plan is a whole number of 32-byte records, got %zd bytes",
                     plan_bytes);
        return -1;
    }
    return plan_bytes / (Py_ssize_t)sizeof(record);
}

/* Sets ValueError and returns -1 unless every record can be run with the functions at hand. */
static int check_plan(const char *plan, Py_ssize_t num_records, const uint64_t functions[NUM_OPS])
{
    static const char *const names[NUM_OPS] = {"map_fn", "set_access_fn", "unmap_fn"};
    for (Py_ssize_t i = 0; i < num_records; i++) {
        record step = read_record(plan, i);
        if (step.op >= NUM_OPS) {
            PyErr_Format(PyExc_ValueError, "record %zd of the plan has the unknown op %llu", i,
                         (unsigned long long)step.op);
            return -1;
        }
        if (functions[step.op] == 0) {
            PyErr_Format(PyExc_ValueError, "record %zd of the plan needs %s, which is 0", i,
                         names[step.op]);
            return -1;
        }
        if (step.op == OP_SET_ACCESS && step.argument > INT_MAX) {
            PyErr_Format(PyExc_ValueError, "record %zd of the plan has access flags %llu, which "
                         "do not fit an int", i, (unsigned long long)step.argument);
            return -1;
        }
    }
    return 0;
}

const char vmkv_execute_doc[] =
    "execute($module, plan, map_fn, set_access_fn, unmap_fn, location_type, location_id, /)\n"
    "--\n\n"
    "Run a plan of mapping calls in order, outside the GIL, up to the first failure.";

PyObject *vmkv_execute(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *plan_object; /* borrowed from args, which the caller keeps until we return */
    uint64_t functions[NUM_OPS];
    vmkv_access access = {0, 0, 0};
    if (!PyArg_ParseTuple(args, "SO&O&O&ii:execute", &plan_object, vmkv_convert_u64,
                          &functions[OP_MAP], vmkv_convert_u64, &functions[OP_SET_ACCESS],
                          vmkv_convert_u64, &functions[OP_UNMAP], &access.location_type,
                          &access.location_id))
        return NULL;
    char *plan;
    Py_ssize_t num_records = open_plan(plan_object, &plan);
    if (num_records < 0)
        return NULL;
    if (check_plan(plan, num_records, functions) < 0)
        return NULL;

    vmkv_map_fn map = (vmkv_map_fn)(uintptr_t)functions[OP_MAP];
    vmkv_set_access_fn set_access = (vmkv_set_access_fn)(uintptr_t)functions[OP_SET_ACCESS];
    vmkv_unmap_fn unmap = (vmkv_unmap_fn)(uintptr_t)functions[OP_UNMAP];
    Py_ssize_t num_done = 0;
    int status = 0;

    Py_BEGIN_ALLOW_THREADS
    for (; num_done < num_records; num_done++) {
        record step = read_record(plan, num_done);
        switch (step.op) {
        case OP_MAP:
            status = map(step.address, (size_t)step.num_bytes, 0, step.argument, 0);
            break;
        case OP_SET_ACCESS:
            access.flags = (int)step.argument;
            status = set_access(step.address, (size_t)step.num_bytes, &access, 1);
            break;
        case OP_UNMAP:
            status = unmap(step.address, (size_t)step.num_bytes);
            break;
        }
        if (status != 0)
            break;
    }
    Py_END_ALLOW_THREADS

    return Py_BuildValue("ni", num_done, status);
}

const char vmkv_transfer_doc[] =
    "transfer($module, plan, copy_fn, fill_fn, stream, /)\n--\n\n"
    "Submit a plan of copies and fills to a stream, outside the GIL, up to the first failure.";

PyObject *vmkv_transfer(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *plan_object;
    uint64_t functions[NUM_TRANSFERS], stream;
    if (!PyArg_ParseTuple(args, "SO&O&O&:transfer", &plan_object, vmkv_convert_u64,
                          &functions[OP_COPY], vmkv_convert_u64, &functions[OP_FILL],
                          vmkv_convert_u64, &stream))
        return NULL;
    char *plan;
    Py_ssize_t num_records = open_plan(plan_object, &plan);
    if (num_records < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < num_records; i++) {
        record step = read_record(plan, i);
        if (step.op >= NUM_TRANSFERS || functions[step.op] == 0)
            return PyErr_Format(PyExc_ValueError, "record %zd of the plan has the op %llu, which "
                                "is unknown or has no function", i, (unsigned long long)step.op);
        if (step.op == OP_FILL && step.argument > UINT8_MAX)
            return PyErr_Format(PyExc_ValueError, "record %zd of the plan fills with %llu, which "
                                "is no byte", i, (unsigned long long)step.argument);
    }
    vmkv_copy_fn copy = (vmkv_copy_fn)(uintptr_t)functions[OP_COPY];
    vmkv_fill_fn fill = (vmkv_fill_fn)(uintptr_t)functions[OP_FILL];
    Py_ssize_t num_done = 0;
    int status = 0;

    Py_BEGIN_ALLOW_THREADS
    for (; num_done < num_records; num_done++) {
        record step = read_record(plan, num_done);
        if (step.op == OP_COPY)
            status = copy(step.address, step.argument, (size_t)step.num_bytes, stream);
        else
            status = fill(step.address, (unsigned char)step.argument, (size_t)step.num_bytes,
                          stream);
        if (status != 0)
            break;
    }
    Py_END_ALLOW_THREADS

    return Py_BuildValue("ni", num_done, status);
}
