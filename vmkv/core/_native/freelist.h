/* The lock-free free list: extent ids that anyone may take, without a lock and without a queue.
 *
 * This header is the whole of it.  It knows nothing of Python, so that the extension and the stress
 * program in tests/native compile the very same code.
 *
 *
 * Theory of operation
 * -------------------
 * An extent id is a small integer in [0, capacity).  Every id is in exactly one of three states:
 *
 *     never issued  --bump-->  out  --push-->  listed
 *                               ^-----pop-----'
 *
 * Equations, true whenever no call is in flight:
 *
 *     num_issued == num_out + sum over size classes of num_listed
 *     state[id] == NEVER_ISSUED   if and only if   id >= num_issued
 *     state[id] == LISTED         if and only if   id is on exactly one stack, exactly once
 *
 * Each size class is a Treiber stack.  Its head is one 64-bit word, `tag << 32 | link`, where a
 * link is `id + 1`, and 0 means "nothing here".  `next[id]` is the link of the id below.  The links
 * are indices and not pointers: there is no node to free, hence no reclamation problem (no hazard
 * pointers, no epochs), and a reader that lost a race reads a stale index, never freed memory.
 *
 * Ids that were never issued are not threaded on any list.  They come from one counter, so creating
 * a list for 2^31 ids touches no memory: the arrays are mapped and fill in as ids are issued.
 *
 *
 * Memory orders, and why each suffices
 * ------------------------------------
 * What must be visible: whatever a thread wrote about an extent before it pushed the id must be
 * seen by the thread that pops that id.  One release/acquire pair on `head` carries it.
 *
 * head, push, swap succeeds: release.  Publishes next[id] and all that the caller wrote earlier.
 * head, push, load and failed swap: relaxed.  A push never follows the link that it read; it only
 *     stores it, and the swap verifies that it is still the head.
 * head, pop, load and failed swap: acquire.  The pop is about to read next[] of the id that it saw,
 *     so it must see what the pusher of that id wrote.  That the pusher may not be the thread whose
 *     swap wrote this value of `head` is fine: every write to `head` is a read-modify-write, so it
 *     belongs to the release sequence of every earlier push, and reading it synchronises with them
 *     all (C11 5.1.2.4, "release sequence").  This is why no pop needs release.
 * head, pop, swap succeeds: acquire, only because C11 wants the failure order to be no stronger
 *     than the success order.  The load that gave the expected value has already acquired.
 * next[], all: relaxed.  Ordered by `head`.  They are atomic because a thread that lost a race may
 *     read next[id] while the new owner of the id writes it; that value is thrown away (see below).
 * state[], all: relaxed.  A state guards nothing; it only detects callers' mistakes.  The swap in
 *     push makes one of two racing pushes of the same id the loser.  For correct callers, the id's
 *     transitions are ordered by how the id itself travels: through `head`, or by whatever the
 *     callers use to hand it over.
 * num_listed, all: relaxed.  Added to before the swap that publishes an id, taken from after the
 *     swap that removes it.  The release/acquire pair orders the two, so the counter never falls
 *     below the length of the list, and hence never below zero.
 * num_issued, all: relaxed.  A fresh id carries no data.
 *
 *
 * ABA
 * ---
 * A pop reads head = (tag, A) and next[A] = B, and is delayed.  Others pop A, pop B, push A again.
 * The head's link is A once more, but B is no longer below it: swapping in B now would list an id
 * that somebody owns.  So every pop adds 1 to the tag, and the delayed swap fails.
 *
 * Adding on pop alone is enough.  For a pop to be wrong, A must have left the stack and come back
 * between its read and its swap, and leaving takes a pop, hence a new tag.  While the tag stays the
 * same there were only pushes, A cannot have been pushed again (it was listed all along), so the
 * value (tag, A) cannot recur.  A push needs no protection: if the head's link is A at the moment
 * of the swap then A is the id to link to, whatever happened meanwhile.
 *
 * The tag has 32 bits and wraps.  A pop would have to sleep through an exact multiple of 2^32 pops
 * of its own class and find the same id on top.  At 10 ns a pop, 2^32 of them take 43 seconds of
 * nothing else; with a driver mapping of some 35 us behind each, 42 hours.  We accept that.
 *
 *
 * Not promised
 * ------------
 * Fairness: lock-free, not wait-free; some thread always makes progress, a given one may starve.
 * Order: last in, first out when one thread runs alone; no order at all between racing threads.
 * A snapshot: vmkv_freelist_count and num_issued are exact only when no call is in flight.
 * Padding: 5 bytes per id, neighbours share cache lines; only heads and the counter have their own.
 * Signals and fork: a child of fork has a consistent copy if no other thread was inside a call.
 */
#ifndef VMKV_FREELIST_H
#define VMKV_FREELIST_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0 /* some systems never reserve swap for a private mapping */
#endif

#if ATOMIC_LLONG_LOCK_FREE != 2 || ATOMIC_INT_LOCK_FREE != 2 || ATOMIC_CHAR_LOCK_FREE != 2
#error "vmkv's free list needs lock-free 8, 32 and 64-bit atomics"
#endif

/* Tests define this to run code at the dangerous moment: a pop has read and not yet swapped. */
#ifndef VMKV_FREELIST_TEST_POINT
#define VMKV_FREELIST_TEST_POINT() ((void)0)
#endif

#define VMKV_FREELIST_CAPACITY_MAX (UINT32_C(1) << 31) /* so that id + 1 and any sum fit 32 bits */
#define VMKV_FREELIST_CLASSES_MAX UINT32_C(64)
#define VMKV_CACHE_LINE 64

enum {
    VMKV_NEVER_ISSUED = 0, /* must be 0: the array begins as zeroes */
    VMKV_OUT = 1,
    VMKV_LISTED = 2,
};

typedef enum {
    VMKV_PUSH_OK,
    VMKV_PUSH_NEVER_ISSUED,   /* refused: bump has not given out this id, or it is out of range */
    VMKV_PUSH_ALREADY_LISTED, /* refused: the id is free already, in this class or another */
} vmkv_push_result;

typedef struct {
    alignas(VMKV_CACHE_LINE) _Atomic uint64_t head; /* tag << 32 | link; link 0: empty */
    _Atomic uint64_t num_listed;                    /* same line: the swap has just fetched it */
} vmkv_stack;

typedef struct {
    uint32_t capacity;       /* ids are 0 .. capacity - 1 */
    uint32_t num_classes;    /* classes are 0 .. num_classes - 1 */
    _Atomic uint32_t *next;  /* [capacity] link of the id below; meaningful while listed */
    _Atomic uint8_t *state;  /* [capacity] one of the three states above */
    alignas(VMKV_CACHE_LINE) _Atomic uint32_t num_issued; /* bump gave out all ids below */
    vmkv_stack stacks[];     /* [num_classes] */
} vmkv_freelist;

static inline uint32_t vmkv_head_link(uint64_t head) { return (uint32_t)head; }
static inline uint32_t vmkv_head_tag(uint64_t head) { return (uint32_t)(head >> 32); }

static inline uint64_t vmkv_head_make(uint32_t tag, uint32_t link)
{
    return (uint64_t)tag << 32 | link;
}

/* Zeroes that take memory where they are written.  Not from calloc: that writes zeroes over memory
 * which was freed before, and takes all of it. */
static inline void *vmkv_zeroes_new(size_t num_bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *zeroes = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return zeroes == MAP_FAILED ? NULL : zeroes;
}

static inline void vmkv_zeroes_delete(void *zeroes, size_t num_bytes)
{
    if (zeroes != NULL)
        munmap(zeroes, num_bytes);
}

static inline void vmkv_freelist_delete(vmkv_freelist *list)
{
    if (list == NULL)
        return;
    vmkv_zeroes_delete((void *)list->next, list->capacity * sizeof *list->next);
    vmkv_zeroes_delete((void *)list->state, list->capacity * sizeof *list->state);
    free(list);
}

/* Returns NULL when memory is short.  1 <= capacity <= 2^31 and 1 <= num_classes <= 64 are the
 * caller's to check.  All-zero bytes are a valid atomic 0 wherever the atomics are lock-free. */
static inline vmkv_freelist *vmkv_freelist_new(uint32_t capacity, uint32_t num_classes)
{
    size_t num_bytes = sizeof(vmkv_freelist) + num_classes * sizeof(vmkv_stack);
    vmkv_freelist *list = aligned_alloc(VMKV_CACHE_LINE, num_bytes);
    if (list == NULL)
        return NULL;
    list->capacity = capacity;
    list->num_classes = num_classes;
    list->next = vmkv_zeroes_new(capacity * sizeof *list->next);
    list->state = vmkv_zeroes_new(capacity * sizeof *list->state);
    atomic_init(&list->num_issued, 0);
    for (uint32_t size_class = 0; size_class < num_classes; size_class++) {
        atomic_init(&list->stacks[size_class].head, 0);
        atomic_init(&list->stacks[size_class].num_listed, 0);
    }
    if (list->next == NULL || list->state == NULL) {
        vmkv_freelist_delete(list);
        return NULL;
    }
    return list;
}

/* Give `id`, which must be out, to `size_class`.  On refusal nothing has changed. */
static inline vmkv_push_result vmkv_freelist_push(vmkv_freelist *list, uint32_t size_class,
                                                  uint32_t id)
{
    if (id >= list->capacity)
        return VMKV_PUSH_NEVER_ISSUED;
    uint8_t seen = VMKV_OUT;
    if (!atomic_compare_exchange_strong_explicit(&list->state[id], &seen, VMKV_LISTED,
                                                 memory_order_relaxed, memory_order_relaxed))
        return seen == VMKV_LISTED ? VMKV_PUSH_ALREADY_LISTED : VMKV_PUSH_NEVER_ISSUED;

    vmkv_stack *stack = &list->stacks[size_class];
    atomic_fetch_add_explicit(&stack->num_listed, 1, memory_order_relaxed);
    uint64_t head = atomic_load_explicit(&stack->head, memory_order_relaxed);
    uint64_t wanted;
    do {
        atomic_store_explicit(&list->next[id], vmkv_head_link(head), memory_order_relaxed);
        wanted = vmkv_head_make(vmkv_head_tag(head), id + 1);
    } while (!atomic_compare_exchange_weak_explicit(&stack->head, &head, wanted,
                                                    memory_order_release, memory_order_relaxed));
    return VMKV_PUSH_OK;
}

/* Take the most recent id of `size_class`; false when the class is empty. */
static inline bool vmkv_freelist_pop(vmkv_freelist *list, uint32_t size_class, uint32_t *id)
{
    vmkv_stack *stack = &list->stacks[size_class];
    uint64_t head = atomic_load_explicit(&stack->head, memory_order_acquire);
    uint64_t wanted;
    do {
        if (vmkv_head_link(head) == 0)
            return false;
        *id = vmkv_head_link(head) - 1;
        uint32_t below = atomic_load_explicit(&list->next[*id], memory_order_relaxed);
        VMKV_FREELIST_TEST_POINT();
        /* `below` may be stale by now; then somebody popped *id, the tag differs, the swap fails */
        wanted = vmkv_head_make(vmkv_head_tag(head) + 1, below);
    } while (!atomic_compare_exchange_weak_explicit(&stack->head, &head, wanted,
                                                    memory_order_acquire, memory_order_acquire));
    atomic_fetch_sub_explicit(&stack->num_listed, 1, memory_order_relaxed);
    atomic_store_explicit(&list->state[*id], VMKV_OUT, memory_order_relaxed);
    return true;
}

/* Take an id of each of `num_wanted` size classes; false when a class runs out, and then none.
 * Not one step for racing threads: while it fails, they miss what it is about to give back. */
static inline bool vmkv_freelist_take(vmkv_freelist *list, const uint32_t *size_classes,
                                      size_t num_wanted, uint32_t *ids)
{
    for (size_t num_taken = 0; num_taken < num_wanted; num_taken++) {
        if (vmkv_freelist_pop(list, size_classes[num_taken], &ids[num_taken]))
            continue;
        while (num_taken-- > 0) /* the last one first, so that the order stays as it was */
            vmkv_freelist_push(list, size_classes[num_taken], ids[num_taken]);
        return false;
    }
    return true;
}

/* Issue the next id that was never issued; false when the capacity is spent.  A loop and not a
 * fetch-and-add, so that failing bumps leave the counter alone. */
static inline bool vmkv_freelist_bump(vmkv_freelist *list, uint32_t *id)
{
    uint32_t num_issued = atomic_load_explicit(&list->num_issued, memory_order_relaxed);
    do {
        if (num_issued == list->capacity)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&list->num_issued, &num_issued, num_issued + 1,
                                                    memory_order_relaxed, memory_order_relaxed));
    atomic_store_explicit(&list->state[num_issued], VMKV_OUT, memory_order_relaxed);
    *id = num_issued;
    return true;
}

/* How many ids are listed in `size_class`.  Racy read; never below the true length. */
static inline uint64_t vmkv_freelist_count(vmkv_freelist *list, uint32_t size_class)
{
    return atomic_load_explicit(&list->stacks[size_class].num_listed, memory_order_relaxed);
}

/* How many ids bump has given out so far.  Racy read. */
static inline uint32_t vmkv_freelist_num_issued(vmkv_freelist *list)
{
    return atomic_load_explicit(&list->num_issued, memory_order_relaxed);
}

#endif
