/* What all files of the extension share: which Python ABI it speaks, how it reads integers. */
#ifndef VMKV_MODULE_H
#define VMKV_MODULE_H

/* One binary for CPython 3.10 and later.  A free-threaded CPython has no stable ABI to offer, so
 * there we compile against the full API; nothing below needs more than the limited one. */
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030A0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

typedef struct {
    PyObject *view_counter_type; /* view_capsule checks its last argument against this */
    PyObject *references_type;   /* count_references its first one's items */
} vmkv_module_state;

/* A converter for "O&": a Python int in [0, 2^64).  The format unit "K" would wrap silently. */
int vmkv_convert_u64(PyObject *object, void *result);

/* Frees an instance of a heap type, and the reference to its type that the instance held. */
void vmkv_free_instance(PyObject *self);

extern PyType_Spec vmkv_free_list_spec; /* freelist_type.c */
extern PyType_Spec vmkv_references_spec; /* references.c */

#endif
