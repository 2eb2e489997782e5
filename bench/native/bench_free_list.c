/* Native half of bench_free_list.py: pop and push pairs from N threads, on one of two lists.
 *
 *     bench_free_list lock-free|mutex THREADS PAIRS REPEATS
 *
 * Prints, for each repeat, the nanoseconds from the moment all threads are released to the moment
 * the last one is done, divided by the pairs that all of them did together.  One discarded repeat
 * warms up.  Each thread does PAIRS pairs; a pair pops an id and pushes it back, to one size class.
 */
#define _GNU_SOURCE

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "freelist.h"

enum { THREADS_MAX = 64, NUM_IDS = 1024 };

/* The rival: the plainest thing that is correct, a stack in an array behind one lock. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint32_t stack[NUM_IDS];
static uint32_t stack_height;

static vmkv_freelist *list;
static bool is_lock_free;
static uint64_t num_pairs;
static pthread_barrier_t barrier;

static void pair_lock_free(void)
{
    uint32_t id;
    if (vmkv_freelist_pop(list, 0, &id))
        vmkv_freelist_push(list, 0, id);
}

static void pair_mutex(void)
{
    uint32_t id = 0;
    bool found;
    pthread_mutex_lock(&mutex);
    found = stack_height > 0;
    if (found)
        id = stack[--stack_height];
    pthread_mutex_unlock(&mutex);
    if (!found)
        return;
    pthread_mutex_lock(&mutex);
    stack[stack_height++] = id;
    pthread_mutex_unlock(&mutex);
}

static void *work(void *unused)
{
    (void)unused;
    pthread_barrier_wait(&barrier);
    if (is_lock_free) {
        for (uint64_t i = 0; i < num_pairs; i++)
            pair_lock_free();
    } else {
        for (uint64_t i = 0; i < num_pairs; i++)
            pair_mutex();
    }
    pthread_barrier_wait(&barrier);
    return NULL;
}

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* The main thread joins both barriers, so its clock brackets the work and not thread creation. */
static double measure(unsigned num_threads)
{
    pthread_t threads[THREADS_MAX];
    pthread_barrier_init(&barrier, NULL, num_threads + 1);
    for (unsigned i = 0; i < num_threads; i++) {
        if (pthread_create(&threads[i], NULL, work, NULL) != 0)
            exit(1);
    }
    double start_ns = now_ns(); /* before the barrier: after it, workers may be far ahead of us */
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    double spent_ns = now_ns() - start_ns;
    for (unsigned i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    return spent_ns / ((double)num_pairs * num_threads);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    is_lock_free = strcmp(argv[1], "lock-free") == 0;
    unsigned num_threads = (unsigned)strtoul(argv[2], NULL, 10);
    num_pairs = strtoull(argv[3], NULL, 10);
    unsigned num_repeats = (unsigned)strtoul(argv[4], NULL, 10);
    if (num_threads < 1 || num_threads > THREADS_MAX || num_pairs < 1)
        return 2;

    list = vmkv_freelist_new(NUM_IDS, 1);
    if (list == NULL)
        return 1;
    uint32_t id;
    while (vmkv_freelist_bump(list, &id)) {
        vmkv_freelist_push(list, 0, id);
        stack[stack_height++] = id;
    }
    measure(num_threads);
    for (unsigned i = 0; i < num_repeats; i++)
        printf("%.3f\n", measure(num_threads));
    vmkv_freelist_delete(list);
    return 0;
}
