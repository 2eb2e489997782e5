/* execute(): a list of map, set-access and unmap calls, in one crossing and outside the GIL.
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
#include <time.h>

enum { OP_MAP = 0, OP_SET_ACCESS = 1, OP_UNMAP = 2, NUM_OPS = 3 };

typedef struct {
    uint64_t op;
    uint64_t address;
    uint64_t num_bytes;
    uint64_t argument; /* map: handle; set_access: flags; unmap: not looked at */
} record;

_Static_assert(sizeof(record) == 32, "a plan is packed as four uint64 a record");
_Static_assert(sizeof(vmkv_access) == 12, "must equal CUmemAccessDesc");

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The bytes of a bytes object need not be aligned for a uint64, so records are copied out. */
static record read_record(const char *plan, Py_ssize_t index)
{
    record result;
    memcpy(&result, plan + index * (Py_ssize_t)sizeof(record), sizeof(record));
    return result;
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
    "execute($module, /, plan, map_fn, set_access_fn, unmap_fn, location_type, location_id)\n"
    "--\n\n"
    "Run a plan of mapping calls in order, outside the GIL, up to the first failure.";

PyObject *vmkv_execute(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"plan",     "map_fn",        "set_access_fn",
                            "unmap_fn", "location_type", "location_id", NULL};
    PyObject *plan_object; /* borrowed from args, which the caller keeps until we return */
    uint64_t functions[NUM_OPS];
    vmkv_access access = {0, 0, 0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "SO&O&O&ii:execute", names, &plan_object,
                                     vmkv_convert_u64, &functions[OP_MAP], vmkv_convert_u64,
                                     &functions[OP_SET_ACCESS], vmkv_convert_u64,
                                     &functions[OP_UNMAP], &access.location_type,
                                     &access.location_id))
        return NULL;
    char *plan;
    Py_ssize_t plan_bytes;
    if (PyBytes_AsStringAndSize(plan_object, &plan, &plan_bytes) < 0)
        return NULL;
    if (plan_bytes % (Py_ssize_t)sizeof(record) != 0)
        return PyErr_Format(PyExc_ValueError, "a plan is a whole number of 32-byte records, got "
                            "%zd bytes", plan_bytes);
    Py_ssize_t num_records = plan_bytes / (Py_ssize_t)sizeof(record);
    if (check_plan(plan, num_records, functions) < 0)
        return NULL;

    vmkv_map_fn map = (vmkv_map_fn)(uintptr_t)functions[OP_MAP];
    vmkv_set_access_fn set_access = (vmkv_set_access_fn)(uintptr_t)functions[OP_SET_ACCESS];
    vmkv_unmap_fn unmap = (vmkv_unmap_fn)(uintptr_t)functions[OP_UNMAP];
    uint64_t spent_ns[NUM_OPS] = {0, 0, 0};
    Py_ssize_t num_done = 0;
    int status = 0;

    Py_BEGIN_ALLOW_THREADS
    for (; num_done < num_records; num_done++) {
        record step = read_record(plan, num_done);
        uint64_t start_ns = now_ns();
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
        spent_ns[step.op] += now_ns() - start_ns;
        if (status != 0)
            break;
    }
    Py_END_ALLOW_THREADS

    return Py_BuildValue("niKKK", num_done, status, (unsigned long long)spent_ns[OP_MAP],
                         (unsigned long long)spent_ns[OP_SET_ACCESS],
                         (unsigned long long)spent_ns[OP_UNMAP]);
}
