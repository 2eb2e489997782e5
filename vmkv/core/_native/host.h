/* Virtual memory of the operating system, behind the signatures of executor.h.  See host.c. */
#ifndef VMKV_HOST_H
#define VMKV_HOST_H

#include "module.h"

extern const char vmkv_host_functions_doc[];
extern const char vmkv_host_reserve_doc[];
extern const char vmkv_host_restoring_doc[];
extern const char vmkv_host_free_doc[];
PyObject *vmkv_host_functions(PyObject *module, PyObject *unused);
PyObject *vmkv_host_reserve(PyObject *module, PyObject *args);
PyObject *vmkv_host_restoring(PyObject *module, PyObject *args);
PyObject *vmkv_host_free(PyObject *module, PyObject *args);

#endif
