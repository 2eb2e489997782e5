/* Tensors over raw addresses, and a count of those that still live.  See tensor.c. */
#ifndef VMKV_TENSOR_H
#define VMKV_TENSOR_H

#include "module.h"

extern PyType_Spec vmkv_view_counter_spec;

extern const char vmkv_view_capsule_doc[];
PyObject *vmkv_view_capsule(PyObject *module, PyObject *args);

#endif
