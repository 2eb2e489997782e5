/* pack_token_ids, documented in tokens.c. */
#ifndef VMKV_TOKENS_H
#define VMKV_TOKENS_H

#include "module.h"

PyObject *vmkv_pack_token_ids(PyObject *module, PyObject *const *token_ids, Py_ssize_t num_tokens);
extern const char vmkv_pack_token_ids_doc[];

#endif
