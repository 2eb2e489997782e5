/* The three calls that change a mapping, as function types, and the loop that runs a list of them.
 *
 * The signatures are those of cuMemMap, cuMemSetAccess and cuMemUnmap in the CUDA driver API, spelt
 * with C's own types so that no CUDA header is needed.  host.c implements the same three for memory
 * of the operating system; whoever holds the addresses cannot tell which they are.
 */
#ifndef VMKV_EXECUTOR_H
#define VMKV_EXECUTOR_H

#include "module.h"

#include <stddef.h>
#include <stdint.h>

enum { /* CUmemAccess_flags */
    VMKV_ACCESS_NONE = 0,
    VMKV_ACCESS_READ = 1,
    VMKV_ACCESS_READ_WRITE = 3,
};

typedef struct { /* CUmemAccessDesc, whose first member is a CUmemLocation of two ints */
    int location_type;
    int location_id;
    int flags;
} vmkv_access;

typedef int (*vmkv_map_fn)(uint64_t address, size_t num_bytes, size_t offset, uint64_t handle,
                           unsigned long long flags);
typedef int (*vmkv_set_access_fn)(uint64_t address, size_t num_bytes, const vmkv_access *accesses,
                                  size_t num_accesses);
typedef int (*vmkv_unmap_fn)(uint64_t address, size_t num_bytes);

extern const char vmkv_execute_doc[];
PyObject *vmkv_execute(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
