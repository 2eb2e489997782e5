/* One kernel launch, for the one kernel that vmkv launches itself. */
#ifndef VMKV_LAUNCH_H
#define VMKV_LAUNCH_H

#include "module.h"

extern const char vmkv_launch_doc[];
PyObject *vmkv_launch(PyObject *module, PyObject *const *args, Py_ssize_t num_args);

#endif
