"""Question: what does the lock-free free list cost, and does it matter?

Prediction: it does not matter. Alone, a pop and a push are five locked instructions (two swaps of
the head, two updates of the count, one change of state) of about 5 ns each: some 25 ns. A mutex,
taken and let go twice, has four: about the same. Under contention every one of them moves a cache
line between cores, some 50 to 100 ns a move, so both lists slow down, and the mutex more, because a
thread that is preempted inside it stops all others. From Python, calling and boxing cost more than
either list, and the GIL lets one thread run at a time, so threads gain nothing. Against that, the
driver call that follows a pop, mapping one extent, costs about 35 us: a thousand times as much.

Verdict: the last sentence holds, and with it the answer: the list is not where the time is. So do
the single-threaded ones. The one on contention was wrong: when threads do nothing but pop and push,
the mutex has the better throughput, because its holder does several pairs while the line stays in
its core, whereas swaps that fail are work thrown away. And from Python the deque is faster than
FreeList, which checks for double pushes and knows size classes. What the lock-free list is for is
something that this bench does not show: no thread ever waits for one that is not running.

Method: every thread does the same number of pairs, a pop and a push of what was popped, on one size
class of 1024 ids. Nanoseconds from the release of all threads until the last is done, divided by
the pairs of all threads together: on enough cores, perfect scaling would halve it whenever the
threads double. One discarded warm-up; median and interquartile range of the repeats. The native
rows are compiled here, with cc -O2.

Rivals: a stack in an array behind one pthread mutex (native threads), and collections.deque, whose
append and pop are atomic under the GIL (Python threads). The deque does not notice double pushes;
the mutex stack neither.

Not measured: several size classes (they share nothing), work between pop and push (it lowers
contention: this is the worst case), memory bound to other sockets, latency tails.
"""

import argparse
import collections
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from common import environment, write_result  # noqa: E402  (the bench folder is not a package)

from vmkv._native import FreeList  # noqa: E402

NUM_THREADS = (1, 2, 4, 8, 16)
NUM_IDS = 1024
NUM_REPEATS = 7
NUM_NATIVE_PAIRS = 2_000_000  # of all threads together
NUM_PYTHON_PAIRS = 400_000
MAP_NS = 35_000  # one mapping through the CUDA driver, for scale

SMOKE_NUM_THREADS = (1, 2)
SMOKE_NUM_REPEATS = 5
SMOKE_NUM_PAIRS = 2_000


def compile_native(folder: pathlib.Path) -> pathlib.Path:
    """Build the C half; says what is missing when that fails."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("bench_free_list needs a C compiler called cc")
    program = folder / "bench_free_list"
    header_folder = HERE.parent / "vmkv" / "_native"
    source = HERE / "native" / "bench_free_list.c"
    subprocess.run(
        [compiler, "-std=c11", "-O2", "-pthread", "-I", header_folder, source, "-o", program],
        check=True,
    )
    return program


def time_native(
    program: pathlib.Path, kind: str, num_threads: int, num_pairs: int, num_repeats: int
) -> list[float]:
    """Nanoseconds a pair, for each repeat."""
    arguments = [kind, num_threads, max(1, num_pairs // num_threads), num_repeats]
    output = subprocess.run(
        [program, *map(str, arguments)], check=True, capture_output=True, text=True
    ).stdout
    return [float(line) for line in output.splitlines()]


def pairs_on_free_list(num_pairs: int, free_list: FreeList) -> None:
    push, pop = free_list.push, free_list.pop
    for _ in range(num_pairs):
        extent_id = pop(0)
        if extent_id is not None:
            push(0, extent_id)


def pairs_on_deque(num_pairs: int, ids: "collections.deque[int]") -> None:
    push, pop = ids.append, ids.pop
    for _ in range(num_pairs):
        push(pop())  # never empty: there are more ids than threads


def time_python(work, shared, num_threads: int, num_pairs: int, num_repeats: int) -> list[float]:
    """Nanoseconds a pair, for each repeat; the first, discarded, warms up."""
    mine = max(1, num_pairs // num_threads)
    result = []
    for _ in range(1 + num_repeats):
        barrier = threading.Barrier(num_threads + 1)

        def run(barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            work(mine, shared)

        threads = [threading.Thread(target=run) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        start_ns = time.perf_counter_ns()
        barrier.wait()
        for thread in threads:
            thread.join()
        result.append((time.perf_counter_ns() - start_ns) / (mine * num_threads))
    return result[1:]


def full_free_list() -> FreeList:
    free_list = FreeList(NUM_IDS, 1)
    for _ in range(NUM_IDS):
        free_list.push(0, free_list.bump())
    return free_list


def summarise(subject: str, threads_are: str, num_threads: int, times_ns: list[float]) -> dict:
    first, median, third = statistics.quantiles(times_ns, n=4, method="inclusive")
    return {
        "subject": subject,
        "threads_are": threads_are,
        "num_threads": num_threads,
        "pair_ns_median": round(median, 2),
        "pair_ns_iqr": round(third - first, 2),
        "share_of_one_mapping": round(median / MAP_NS, 5),
        "num_repeats": len(times_ns),
    }


def measure(num_threads_list, num_native_pairs, num_python_pairs, num_repeats) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = compile_native(pathlib.Path(folder))
        for kind in ("lock-free", "mutex"):
            for num_threads in num_threads_list:
                times_ns = time_native(program, kind, num_threads, num_native_pairs, num_repeats)
                rows.append(summarise(f"{kind} stack", "native", num_threads, times_ns))
    for subject, work, make in (
        ("FreeList", pairs_on_free_list, full_free_list),
        ("collections.deque", pairs_on_deque, lambda: collections.deque(range(NUM_IDS))),
    ):
        for num_threads in num_threads_list:
            times_ns = time_python(work, make(), num_threads, num_python_pairs, num_repeats)
            rows.append(summarise(subject, "Python", num_threads, times_ns))
    return rows


def main(argv: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a second's work, for CI")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the record")
    options = parser.parse_args(argv)
    if options.smoke:
        rows = measure(SMOKE_NUM_THREADS, SMOKE_NUM_PAIRS, SMOKE_NUM_PAIRS, SMOKE_NUM_REPEATS)
    else:
        rows = measure(NUM_THREADS, NUM_NATIVE_PAIRS, NUM_PYTHON_PAIRS, NUM_REPEATS)

    print(f"{'subject':<18} {'threads':>15} {'ns a pair':>10} {'IQR':>8}   of a mapping")
    for row in rows:
        print(
            f"{row['subject']:<18} {row['num_threads']:>8} {row['threads_are']}"
            f" {row['pair_ns_median']:>10.1f} {row['pair_ns_iqr']:>8.1f}"
            f"   {row['share_of_one_mapping']:.2%}"
        )
    print("The list is not where the time is: one driver mapping costs about 35 us.")

    question, prediction = __doc__.split("\n\n")[:2]
    if options.json is not None or not options.smoke:
        record = {
            "question": question.removeprefix("Question: "),
            "prediction": " ".join(prediction.removeprefix("Prediction: ").split()),
            "rows": rows,
            "environment": environment(),
        }
        print("wrote", write_result("free_list", record, options.json))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
