/* The calls that change a mapping or move bytes, as function types, and loops that run lists of
 * them.
 *
 * The signatures are those of cuMemMap, cuMemSetAccess, cuMemUnmap, cuMemcpyAsync and
 * cuMemsetD8Async in the CUDA driver API, spelt with C's own types so that no CUDA header is
 * needed.  host.c implements the same five for memory of the operating system; whoever holds the
 * addresses cannot tell which they are.
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
typedef int (*vmkv_copy_fn)(uint64_t destination, uint64_t source, size_t num_bytes,
                            uint64_t stream);
typedef int (*vmkv_fill_fn)(uint64_t address, unsigned char byte, size_t num_bytes,
                            uint64_t stream);

extern const char vmkv_execute_doc[];
extern const char vmkv_transfer_doc[];
PyObject *vmkv_execute(PyObject *module, PyObject *args);
PyObject *vmkv_transfer(PyObject *module, PyObject *args);

#endif
