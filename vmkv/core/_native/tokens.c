/* pack_token_ids(): integers as the bytes that prefixes are compared by.
 *
 * Why native: every prompt is packed when its beginning is looked for, all of it.  struct.pack
 * reads each integer's object twice; it takes twice as long.
 *
 * Why they are arguments: CPython hands those over as an array, a tuple's own or one filled in one
 * go.  The stable ABI has no other, and a call for each item of a list costs as much as to read it.
 */
#include "tokens.h"

#include <string.h>

const char vmkv_pack_token_ids_doc[] =
    "pack_token_ids($module, /, *token_ids)\n--\n\n"
    "Eight bytes for each integer, as the machine has them.";

PyObject *vmkv_pack_token_ids(PyObject *Py_UNUSED(module), PyObject *const *token_ids,
                              Py_ssize_t num_tokens)
{
    PyObject *packed = PyBytes_FromStringAndSize(NULL, num_tokens * (Py_ssize_t)sizeof(int64_t));
    char *to = packed == NULL ? NULL : PyBytes_AsString(packed);
    for (Py_ssize_t i = 0; packed != NULL && i < num_tokens; i++, to += sizeof(int64_t)) {
        int64_t value = PyLong_AsLongLong(token_ids[i]);
        memcpy(to, &value, sizeof value);
        if (value == -1 && PyErr_Occurred())
            Py_CLEAR(packed);
    }
    return packed;
}
