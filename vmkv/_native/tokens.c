/* pack_token_ids(): integers as the bytes that prefixes are compared by.
 *
 * Why native: every prompt is packed when its beginning is looked for, all of it.  struct.pack
 * makes a tuple of arguments first and reads each integer's object twice; it takes twice as long.
 */
#include "tokens.h"

#include <string.h>

const char vmkv_pack_token_ids_doc[] =
    "pack_token_ids($module, token_ids, /)\n--\n\n"
    "Eight bytes for each integer, as the machine has them.";

/* Writes the integers of a list or tuple; returns -1 with an error set where one is none. */
static int pack_all(PyObject *list, Py_ssize_t num_tokens, char *to)
{
    int is_list = PyList_Check(list);
    for (Py_ssize_t i = 0; i < num_tokens; i++, to += sizeof(int64_t)) {
        /* NULL if an `__index__` shortened it. */
        PyObject *token_id = is_list ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
        if (token_id == NULL)
            return -1;
        int is_exact = PyLong_CheckExact(token_id);
        if (!is_exact)
            Py_INCREF(token_id); /* an `__index__` may drop it from the list */
        int64_t value = PyLong_AsLongLong(token_id);
        if (!is_exact)
            Py_DECREF(token_id);
        if (value == -1 && PyErr_Occurred())
            return -1;
        memcpy(to, &value, sizeof value);
    }
    return 0;
}

PyObject *vmkv_pack_token_ids(PyObject *Py_UNUSED(module), PyObject *token_ids)
{
    PyObject *list = PySequence_Fast(token_ids, "token ids are no sequence");
    if (list == NULL)
        return NULL;
    Py_ssize_t num_tokens = PySequence_Size(list);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, num_tokens * (Py_ssize_t)sizeof(int64_t));
    if (packed != NULL && pack_all(list, num_tokens, PyBytes_AsString(packed)) < 0)
        Py_CLEAR(packed);
    Py_DECREF(list);
    return packed;
}
