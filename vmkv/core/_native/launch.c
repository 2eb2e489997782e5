/* launch(): a kernel launch with 64-bit arguments, at the cost of the driver call.
 *
 * Writing a token's keys and values is one launch per layer and step.  Through Triton's launcher
 * it takes 14 us of host time, through cuda-python's 8, and a decode step of an 8B model launches
 * it 32 times.  The function has cuLaunchKernel's signature, spelt with C's own types.
 *
 * The GIL stays held: a launch only enqueues, and letting go of the lock costs more than the call.
 */
#include "launch.h"

#include <stdint.h>
#include <string.h>

enum { MAX_WORDS = 32 };

typedef int (*launch_fn)(uint64_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z,
                         unsigned shared_bytes, uint64_t stream, void **arguments, void **extra);

const char vmkv_launch_doc[] =
    "launch($module, launch_fn, function, grid_x, block_x, stream, words, /)\n"
    "--\n\n"
    "Launch a kernel whose arguments are 64-bit words; returns the driver's status.";

PyObject *vmkv_launch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6)
        return PyErr_Format(PyExc_TypeError, "launch takes 6 arguments, got %zd", num_args);
    uint64_t numbers[5];
    for (int i = 0; i < 5; i++)
        if (!vmkv_convert_u64(args[i], &numbers[i]))
            return NULL;
    char *packed;
    Py_ssize_t num_bytes;
    if (PyBytes_AsStringAndSize(args[5], &packed, &num_bytes) < 0)
        return NULL;
    Py_ssize_t num_words = num_bytes / 8;
    if (num_bytes % 8 != 0 || num_words > MAX_WORDS)
        return PyErr_Format(PyExc_ValueError,
                            "arguments are at most %d words of 8 bytes, got %zd bytes", MAX_WORDS,
                            num_bytes);
    if (numbers[0] == 0 || numbers[2] == 0 || numbers[2] > UINT32_MAX || numbers[3] == 0 ||
        numbers[3] > 1024)
        return PyErr_Format(PyExc_ValueError,
                            "a launch needs a function, a grid of 1 to 2**32 - 1 blocks and "
                            "blocks of 1 to 1024 threads");

    uint64_t words[MAX_WORDS];
    void *arguments[MAX_WORDS];
    memcpy(words, packed, (size_t)num_bytes);
    for (Py_ssize_t i = 0; i < num_words; i++)
        arguments[i] = &words[i];
    launch_fn launch = (launch_fn)(uintptr_t)numbers[0];
    int status = launch(numbers[1], (unsigned)numbers[2], 1, 1, (unsigned)numbers[3], 1, 1, 0,
                        numbers[4], arguments, NULL);
    return PyLong_FromLong(status);
}
