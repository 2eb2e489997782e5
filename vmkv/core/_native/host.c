/* The host backend's calls: mmap, mprotect and memmove in the clothes of the CUDA driver.
 *
 *     driver              here
 *     cuMemMap            mmap the file shared at a fixed address, with no access yet
 *     cuMemSetAccess      mprotect
 *     cuMemUnmap          mmap an inaccessible anonymous mapping over it: the reservation survives
 *     cuMemcpyAsync       memmove, done when it returns; there is one stream, whatever its name
 *     cuMemsetD8Async     memset, likewise
 *
 * A handle names bytes of a file (a memfd) from an offset on, in one integer:
 *
 *     handle == fd << 40 | file_offset >> 12       0 <= fd < 2^24, 0 <= file_offset < 2^52
 *
 * so the same `execute` runs on a machine without a GPU.  Each function returns 0 or an errno.
 *
 * These are calls, not a backend.  They refuse what the kernel would round (sizes that are not
 * whole pages of the OS) or take for a no-op (zero bytes), but they believe the address: MAP_FIXED
 * over memory that is not a reservation destroys what was there.  core/backend/host.py keeps the
 * books that refuse all the rest.
 */
#include "host.h"

#include "executor.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0 /* some systems never reserve swap for a private mapping */
#endif

/* How a reservation is mapped: nothing behind it, nothing charged for it, no access. */
#define RESERVE_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static uint64_t os_page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* True for a non-zero whole number of pages of the operating system. */
static bool is_whole_pages(uint64_t num_bytes)
{
    return num_bytes != 0 && num_bytes % os_page_bytes() == 0;
}

/* The kernel limits the mappings of a process (vm.max_map_count), and at the limit even unmapping
 * fails, and malloc.  So a block of pages that are mappings each, since their access differs in
 * turn, is held back.  Nothing is mapped without it; who runs into the limit drops it. */
#define NUM_SPARE 256
static atomic_uintptr_t spare;
static atomic_int num_restoring; /* threads that map again what was mapped before */

static void drop_spare(void)
{
    uintptr_t held = atomic_exchange(&spare, 0);
    if (held != 0)
        munmap((void *)held, NUM_SPARE * os_page_bytes());
}

static bool hold_spare(void)
{
    if (atomic_load(&spare) != 0)
        return true;
    size_t page_bytes = os_page_bytes(), num_bytes = NUM_SPARE * page_bytes;
    char *block = mmap(NULL, num_bytes, PROT_NONE, RESERVE_FLAGS, -1, 0);
    if (block == MAP_FAILED)
        return false;
    uintptr_t none = 0;
    bool is_divided = true;
    for (size_t at = 1; is_divided && at < NUM_SPARE; at += 2)
        is_divided = mprotect(block + at * page_bytes, page_bytes, PROT_READ) == 0;
    if (!is_divided || !atomic_compare_exchange_strong(&spare, &none, (uintptr_t)block))
        munmap(block, num_bytes);
    return is_divided;
}

/* Returns errno and keeps it; if there were too many mappings, there are fewer now. */
static int failure(void)
{
    if (errno == ENOMEM)
        drop_spare();
    return errno;
}

static int host_map(uint64_t address, size_t num_bytes, size_t offset, uint64_t handle,
                    unsigned long long flags)
{
    int fd = (int)(handle >> 40);
    off_t file_offset = (off_t)((handle & ((UINT64_C(1) << 40) - 1)) << 12);
    if (!is_whole_pages(num_bytes) || flags != 0)
        return EINVAL;
    if (atomic_load(&num_restoring) != 0)
        drop_spare();
    else if (!hold_spare())
        return ENOMEM;
    void *mapped = mmap((void *)(uintptr_t)address, num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        fd, file_offset + (off_t)offset);
    return mapped == MAP_FAILED ? failure() : 0;
}

static int host_set_access(uint64_t address, size_t num_bytes, const vmkv_access *accesses,
                           size_t num_accesses)
{
    if (!is_whole_pages(num_bytes) || num_accesses != 1)
        return EINVAL;
    int protection;
    switch (accesses[0].flags) {
    case VMKV_ACCESS_NONE:
        protection = PROT_NONE;
        break;
    case VMKV_ACCESS_READ:
        protection = PROT_READ;
        break;
    case VMKV_ACCESS_READ_WRITE:
        protection = PROT_READ | PROT_WRITE;
        break;
    default:
        return EINVAL;
    }
    return mprotect((void *)(uintptr_t)address, num_bytes, protection) != 0 ? failure() : 0;
}

static int host_unmap(uint64_t address, size_t num_bytes)
{
    if (!is_whole_pages(num_bytes))
        return EINVAL;
    /* One call that replaces, and not munmap then mmap: no other thread's mmap can slip between. */
    void *at = (void *)(uintptr_t)address;
    int flags = RESERVE_FLAGS | MAP_FIXED;
    if (mmap(at, num_bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED ||
        (failure() == ENOMEM && mmap(at, num_bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED))
        return 0;
    return errno;
}

/* Like munmap, but returns an errno; at the limit on mappings it succeeds too. */
static int unreserve(void *address, size_t num_bytes)
{
    if (munmap(address, num_bytes) == 0 || (failure() == ENOMEM && munmap(address, num_bytes) == 0))
        return 0;
    return errno;
}

static int host_copy(uint64_t destination, uint64_t source, size_t num_bytes, uint64_t stream)
{
    (void)stream;
    /* memmove: ranges that overlap are the caller's mistake, and must not become ours. */
    memmove((void *)(uintptr_t)destination, (const void *)(uintptr_t)source, num_bytes);
    return 0;
}

static int host_fill(uint64_t address, unsigned char byte, size_t num_bytes, uint64_t stream)
{
    (void)stream;
    memset((void *)(uintptr_t)address, byte, num_bytes);
    return 0;
}

/* The types in executor.h are what these will be called through; a mismatch must not compile. */
static const vmkv_map_fn map_entry = host_map;
static const vmkv_set_access_fn set_access_entry = host_set_access;
static const vmkv_unmap_fn unmap_entry = host_unmap;
static const vmkv_copy_fn copy_entry = host_copy;
static const vmkv_fill_fn fill_entry = host_fill;

const char vmkv_host_functions_doc[] =
    "host_functions($module, /)\n--\n\n"
    "Addresses of the host's map, set_access and unmap, for execute(), and of its copy and fill, "
    "for transfer().";

PyObject *vmkv_host_functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K}",
                         "map", (unsigned long long)(uintptr_t)map_entry,
                         "set_access", (unsigned long long)(uintptr_t)set_access_entry,
                         "unmap", (unsigned long long)(uintptr_t)unmap_entry,
                         "copy", (unsigned long long)(uintptr_t)copy_entry,
                         "fill", (unsigned long long)(uintptr_t)fill_entry);
}

/* Reserves more than asked for, then gives back both ends: mmap has no argument for alignment.
 * Returns 0 or an errno. */
static int reserve_aligned(uint64_t num_bytes, uint64_t alignment, uint64_t *address)
{
    uint64_t slack = alignment - os_page_bytes(); /* mmap aligns to the page by itself */
    if (num_bytes > SIZE_MAX - slack)
        return ENOMEM;
    void *mapped = mmap(NULL, num_bytes + slack, PROT_NONE, RESERVE_FLAGS, -1, 0);
    if (mapped == MAP_FAILED)
        return errno;
    uint64_t start = (uint64_t)(uintptr_t)mapped;
    uint64_t aligned = (start + alignment - 1) & ~(alignment - 1);
    uint64_t before = aligned - start;
    uint64_t after = slack - before;
    /* Trimming what we have just mapped only fails when splitting it exceeds the kernel's limit on
     * mappings.  Then the trimmed ends or the whole must not stay behind. */
    int error = before == 0 ? 0 : unreserve(mapped, before);
    if (error != 0) {
        unreserve(mapped, num_bytes + slack);
        return error;
    }
    error = after == 0 ? 0 : unreserve((void *)(uintptr_t)(aligned + num_bytes), after);
    if (error != 0) {
        unreserve((void *)(uintptr_t)aligned, num_bytes + after);
        return error;
    }
    *address = aligned;
    return 0;
}

const char vmkv_host_restoring_doc[] =
    "host_restoring($module, change, /)\n--\n\n"
    "Add to the number of threads that map again what was mapped before.";

PyObject *vmkv_host_restoring(PyObject *Py_UNUSED(module), PyObject *args)
{
    int change;
    if (!PyArg_ParseTuple(args, "i:host_restoring", &change))
        return NULL;
    atomic_fetch_add(&num_restoring, change);
    Py_RETURN_NONE;
}

const char vmkv_host_reserve_doc[] =
    "host_reserve($module, num_bytes, alignment, /)\n--\n\n"
    "Reserve virtual addresses with nothing behind them; return the first.";

PyObject *vmkv_host_reserve(PyObject *Py_UNUSED(module), PyObject *args)
{
    uint64_t num_bytes, alignment;
    if (!PyArg_ParseTuple(args, "O&O&:host_reserve", vmkv_convert_u64, &num_bytes,
                          vmkv_convert_u64, &alignment))
        return NULL;
    if (!is_whole_pages(num_bytes))
        return PyErr_Format(PyExc_ValueError, "num_bytes must be a positive multiple of the OS "
                            "page, %llu, got %llu", (unsigned long long)os_page_bytes(),
                            (unsigned long long)num_bytes);
    if (alignment < os_page_bytes() || (alignment & (alignment - 1)) != 0)
        return PyErr_Format(PyExc_ValueError, "alignment must be a power of two and at least the "
                            "OS page, %llu, got %llu", (unsigned long long)os_page_bytes(),
                            (unsigned long long)alignment);
    uint64_t address = 0;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = reserve_aligned(num_bytes, alignment, &address);
    Py_END_ALLOW_THREADS
    if (error != 0) {
        errno = error; /* taking the GIL back may have changed it */
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLongLong(address);
}

const char vmkv_host_free_doc[] =
    "host_free($module, address, num_bytes, /)\n--\n\n"
    "Give virtual addresses back, and drop whatever is mapped there.";

PyObject *vmkv_host_free(PyObject *Py_UNUSED(module), PyObject *args)
{
    uint64_t address, num_bytes;
    if (!PyArg_ParseTuple(args, "O&O&:host_free", vmkv_convert_u64, &address, vmkv_convert_u64,
                          &num_bytes))
        return NULL;
    int error;
    Py_BEGIN_ALLOW_THREADS
    if (!is_whole_pages(num_bytes))
        error = EINVAL;
    else
        error = unreserve((void *)(uintptr_t)address, num_bytes);
    Py_END_ALLOW_THREADS
    if (error != 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}
