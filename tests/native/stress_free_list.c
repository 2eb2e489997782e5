/* Stress for the lock-free free list.  Not a benchmark: it yields on purpose.
 *
 *     stress_free_list THREADS OPS     race: every thread takes, checks, marks and gives ids back
 *     stress_free_list aba             replay the ABA schedule in one thread, the same every time
 *
 * Exit code 0 when all holds; 1 with a message for the first thing that does not; 2 for bad usage.
 *
 * Errors that a race would cause, and the checks that find them:
 *
 *     an id handed out twice           owners[id], swapped atomically on taking and on giving back
 *     an id lost                       the census at the end
 *     an id handed out before what     marks[id], plain memory that only the owner touches; a torn
 *       its last owner wrote is seen     or stale one fails here, and ThreadSanitizer reports it
 *                                        whenever the list's memory orders do not order it
 *
 * The bookkeeping is relaxed throughout.  Anything stronger would order the threads by itself and
 * hide a missing order in the list.
 *
 * Not covered: fairness, wrapping of the 32-bit tag, and reorderings that neither this processor
 * nor ThreadSanitizer's model can show.
 */
#define _GNU_SOURCE

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

static void test_point(void);
#define VMKV_FREELIST_TEST_POINT() test_point()
#include "freelist.h"

enum {
    NUM_CLASSES = 3,
    NUM_HELD_MAX = 4,   /* ids one thread holds at once; few, so that lists run short */
    IDS_PER_THREAD = 3, /* fewer than held at most, so that threads use each other's ids */
    THREADS_MAX = 64,
    YIELD_EVERY = 61,   /* pops that are delayed between reading and swapping; prime, to drift */
};

/* What runs between the read and the swap of a pop; NULL for nothing. */
static _Thread_local void (*interference)(void);

static void test_point(void)
{
    if (interference != NULL)
        interference();
}

static int fail(const char *what, uint64_t a, uint64_t b)
{
    fprintf(stderr, "stress_free_list: %s (%" PRIu64 ", %" PRIu64 ")\n", what, a, b);
    return 1;
}

/* ---- the ABA schedule --------------------------------------------------------------------- */

static vmkv_freelist *aba_list;

/* The pop under way finds the same head, but the id below the head is no longer listed. */
static void pop_two_push_one(void)
{
    uint32_t first = 0, second = 0;
    interference = NULL; /* once */
    vmkv_freelist_pop(aba_list, 0, &first);
    vmkv_freelist_pop(aba_list, 0, &second);
    vmkv_freelist_push(aba_list, 0, first);
}

static int run_aba(void)
{
    aba_list = vmkv_freelist_new(3, 1);
    if (aba_list == NULL)
        return fail("no memory", 0, 0);
    uint32_t id = 0;
    while (vmkv_freelist_bump(aba_list, &id)) {
    }
    for (uint32_t i = 3; i-- > 0;)
        vmkv_freelist_push(aba_list, 0, i); /* from the top: 0, 1, 2 */

    interference = pop_two_push_one; /* takes 0 and 1, gives 0 back */
    if (!vmkv_freelist_pop(aba_list, 0, &id) || id != 0)
        return fail("the delayed pop should have taken 0, which is on top again", id, 0);
    if (!vmkv_freelist_pop(aba_list, 0, &id) || id != 2)
        return fail("ABA: an id that is out was handed out again; wanted 2, got", id, 0);
    if (vmkv_freelist_pop(aba_list, 0, &id))
        return fail("ABA: an id left on a list that should be empty", id, 0);
    if (vmkv_freelist_count(aba_list, 0) != 0)
        return fail("ABA: the count of an empty list", vmkv_freelist_count(aba_list, 0), 0);
    vmkv_freelist_delete(aba_list);
    return 0;
}

/* ---- the race ----------------------------------------------------------------------------- */

typedef struct {
    uint64_t value;
    uint64_t complement; /* always ~value, unless two threads write at once */
} mark;

typedef struct {
    vmkv_freelist *list;
    _Atomic uint32_t *owners; /* [capacity] thread number + 1, or 0 while it is free */
    mark *marks;              /* [capacity] plain on purpose */
    _Atomic bool *failed;     /* shared: one failure stops all threads */
    pthread_barrier_t *start;
    uint32_t number;
    uint64_t num_ops;
    uint64_t random;
    uint32_t num_held;
    uint32_t held[NUM_HELD_MAX];
} worker;

/* xorshift64*: seeded by the thread number, so each thread makes the same choices every time. */
static uint32_t draw(worker *self, uint32_t limit)
{
    self->random ^= self->random >> 12;
    self->random ^= self->random << 25;
    self->random ^= self->random >> 27;
    return (uint32_t)((self->random * UINT64_C(0x2545F4914F6CDD1D)) >> 33) % limit;
}

static void yield_sometimes(void)
{
    static _Thread_local uint32_t num_pops;
    if (++num_pops % YIELD_EVERY == 0)
        sched_yield();
}

static int hold(worker *self, uint32_t id)
{
    uint32_t owner = atomic_exchange_explicit(&self->owners[id], self->number + 1,
                                              memory_order_relaxed);
    if (owner != 0)
        return fail("an id was handed out twice; id, the other owner + 1", id, owner);
    mark *found = &self->marks[id];
    if (found->complement != ~found->value)
        return fail("a mark is torn; id, thread", id, self->number);
    found->value++;
    found->complement = ~found->value;
    self->held[self->num_held++] = id;
    return 0;
}

/* One id, from a list or new; or as many as a draw says, all or none. */
static int take(worker *self)
{
    uint32_t num_wanted = 1 + draw(self, NUM_HELD_MAX - self->num_held);
    uint32_t size_classes[NUM_HELD_MAX], ids[NUM_HELD_MAX];
    for (uint32_t i = 0; i < num_wanted; i++)
        size_classes[i] = draw(self, NUM_CLASSES);
    if (!vmkv_freelist_take(self->list, size_classes, num_wanted, ids)) {
        num_wanted = 1;
        if (!vmkv_freelist_bump(self->list, &ids[0]))
            return 0; /* nothing to take is not a failure */
    }
    for (uint32_t i = 0; i < num_wanted; i++)
        if (hold(self, ids[i]) != 0)
            return 1;
    return 0;
}

static int give_back(worker *self)
{
    uint32_t at = draw(self, self->num_held);
    uint32_t id = self->held[at];
    self->held[at] = self->held[--self->num_held];
    uint32_t owner = atomic_exchange_explicit(&self->owners[id], 0, memory_order_relaxed);
    if (owner != self->number + 1)
        return fail("an id changed hands while it was out; id, owner + 1", id, owner);
    vmkv_push_result result = vmkv_freelist_push(self->list, draw(self, NUM_CLASSES), id);
    if (result != VMKV_PUSH_OK)
        return fail("a correct push was refused; id, result", id, result);
    return 0;
}

static void *work(void *argument)
{
    worker *self = argument;
    interference = yield_sometimes;
    pthread_barrier_wait(self->start);
    for (uint64_t op = 0; op < self->num_ops; op++) {
        bool is_taking = self->num_held == 0 || (self->num_held < NUM_HELD_MAX && draw(self, 2));
        if ((is_taking ? take(self) : give_back(self)) != 0)
            atomic_store_explicit(self->failed, true, memory_order_relaxed);
        if (atomic_load_explicit(self->failed, memory_order_relaxed))
            return NULL;
    }
    while (self->num_held > 0) {
        if (give_back(self) != 0) {
            atomic_store_explicit(self->failed, true, memory_order_relaxed);
            return NULL;
        }
    }
    return NULL;
}

/* Once all threads have pushed their ids and ended, every issued id is listed once, no other. */
static int take_census(vmkv_freelist *list)
{
    uint32_t num_issued = vmkv_freelist_num_issued(list);
    uint64_t num_listed = 0;
    for (uint32_t size_class = 0; size_class < NUM_CLASSES; size_class++) {
        uint64_t counted = vmkv_freelist_count(list, size_class);
        uint64_t popped = 0;
        uint32_t id;
        while (vmkv_freelist_pop(list, size_class, &id)) {
            if (++popped > num_issued)
                return fail("a list runs in circles; class, ids", size_class, popped);
        }
        if (counted != popped)
            return fail("the count was wrong; counted, popped", counted, popped);
        num_listed += popped;
    }
    if (num_listed != num_issued)
        return fail("ids were lost or doubled; listed, issued", num_listed, num_issued);
    for (uint32_t id = 0; id < list->capacity; id++) {
        uint8_t wanted = id < num_issued ? VMKV_OUT : VMKV_NEVER_ISSUED;
        if (atomic_load(&list->state[id]) != wanted)
            return fail("a state is wrong after the census; id, wanted", id, wanted);
    }
    return 0;
}

static int run_race(uint32_t num_threads, uint64_t num_ops)
{
    static worker workers[THREADS_MAX];
    static pthread_t threads[THREADS_MAX];
    _Atomic bool failed = false;
    pthread_barrier_t start;
    uint32_t capacity = num_threads * IDS_PER_THREAD;
    vmkv_freelist *list = vmkv_freelist_new(capacity, NUM_CLASSES);
    _Atomic uint32_t *owners = calloc(capacity, sizeof *owners);
    mark *marks = calloc(capacity, sizeof *marks);
    if (list == NULL || owners == NULL || marks == NULL)
        return fail("no memory for ids", capacity, 0);
    for (uint32_t id = 0; id < capacity; id++)
        marks[id].complement = ~marks[id].value;

    pthread_barrier_init(&start, NULL, num_threads);
    for (uint32_t i = 0; i < num_threads; i++) {
        workers[i] = (worker){.list = list, .owners = owners, .marks = marks, .failed = &failed,
                              .start = &start, .number = i, .num_ops = num_ops, .random = i + 1};
        if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0) {
            fail("cannot start thread", i, num_threads);
            exit(1); /* those already started wait at the barrier for ever */
        }
    }
    for (uint32_t i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);

    int result = atomic_load(&failed) ? 1 : take_census(list);
    vmkv_freelist_delete(list);
    free((void *)owners);
    free(marks);
    return result;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "aba") == 0)
        return run_aba();
    if (argc == 3) {
        unsigned long num_threads = strtoul(argv[1], NULL, 10);
        unsigned long long num_ops = strtoull(argv[2], NULL, 10);
        if (num_threads >= 1 && num_threads <= THREADS_MAX)
            return run_race((uint32_t)num_threads, num_ops);
    }
    fprintf(stderr, "usage: stress_free_list THREADS OPS | aba   (1 <= THREADS <= %d)\n",
            THREADS_MAX);
    return 2;
}
