/* count_references, documented in references.c; the class is vmkv_references_spec, in module.h. */
#ifndef VMKV_REFERENCES_H
#define VMKV_REFERENCES_H

#include "module.h"

PyObject *vmkv_count_references(PyObject *module, PyObject *args);
extern const char vmkv_count_references_doc[];

#endif
