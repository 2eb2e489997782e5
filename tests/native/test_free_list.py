"""The compiled free list, from Python.

One thread against a model, and the calls that each method refuses. Races between native threads are
in ``test_stress.py``, which compiles the same header without Python.

Not covered: capacities whose arrays do not fit in memory.
"""

import resource

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vmkv.core import _native as native

CAPACITY = 12
NUM_CLASSES = 3


def test_properties_report_the_arguments():
    """Capacity and classes are as constructed, and nothing is issued yet."""
    free_list = native.FreeList(capacity=7, num_classes=5)
    assert (free_list.capacity, free_list.num_classes, free_list.num_issued) == (7, 5, 0)


def test_the_largest_capacity_costs_nothing_until_used():
    """A list for 2**31 ids is made at once: its arrays stay untouched until ids are issued."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        free_list = native.FreeList(2**31, 64)
    except MemoryError:
        pytest.skip("this system does not let 10 GiB be reserved")
    free_list.push(63, free_list.bump())
    assert free_list.pop(63) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


def test_lists_that_are_made_and_dropped_take_no_memory():
    """New lists at the addresses of dropped ones do not write memory that is zero already."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = []
    for at in range(20):
        free_list = native.FreeList(2**24, 7)
        if at % 2:
            kept.append(free_list)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


@pytest.mark.parametrize("capacity", [0, -1, 2**31 + 1, 2**100])
def test_constructor_refuses_a_capacity_outside_its_interval(capacity):
    """Capacity is 1 to 2**31, and the message says so."""
    with pytest.raises(ValueError, match=r"capacity must be in 1\.\.2\*\*31, got"):
        native.FreeList(capacity, 1)


@pytest.mark.parametrize("num_classes", [0, -1, 65, 2**100])
def test_constructor_refuses_a_class_count_outside_its_interval(num_classes):
    """There are 1 to 64 classes, and the message says so."""
    with pytest.raises(ValueError, match=r"num_classes must be in 1\.\.64, got"):
        native.FreeList(1, num_classes)


@pytest.mark.parametrize("size_class", [-1, NUM_CLASSES, 2**100])
def test_methods_refuse_an_unknown_class(size_class):
    """The errors of push, pop, count and take name the classes that exist."""
    free_list = native.FreeList(CAPACITY, NUM_CLASSES)
    extent_id = free_list.bump()
    for method, arguments in (
        (free_list.push, (size_class, extent_id)),
        (free_list.pop, (size_class,)),
        (free_list.count, (size_class,)),
        (free_list.take, ([0, size_class],)),
    ):
        with pytest.raises(ValueError, match=r"size_class must be in 0\.\.2, got"):
            method(*arguments)
    free_list.push(0, extent_id)  # the refused push has not changed the id's state


@pytest.mark.parametrize("extent_id", [-1, CAPACITY, 2**100])
def test_push_refuses_an_id_beyond_the_capacity(extent_id):
    """There are as many ids as the capacity says."""
    with pytest.raises(ValueError, match=r"extent_id must be in 0\.\.11, got"):
        native.FreeList(CAPACITY, NUM_CLASSES).push(0, extent_id)


def test_methods_refuse_wrong_types():
    """Neither a float nor a missing argument is taken for an id."""
    free_list = native.FreeList(CAPACITY, NUM_CLASSES)
    with pytest.raises(TypeError):
        free_list.push(0, 1.0)
    with pytest.raises(TypeError):
        free_list.push(0)
    with pytest.raises(TypeError):
        free_list.pop("0")
    with pytest.raises(TypeError):
        native.FreeList(CAPACITY)


def test_lists_do_not_leak():
    """Making and dropping lists, and failing to make them, leaves nothing behind."""

    def churn(num_rounds):
        for _ in range(num_rounds):
            free_list = native.FreeList(1000, 64)  # some 4 KiB of heads, all of them written
            free_list.push(0, free_list.bump())
            with pytest.raises(ValueError, match="pushed twice"):
                free_list.push(0, 0)
            with pytest.raises(ValueError, match="capacity"):
                native.FreeList(0, 64)

    churn(100)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    churn(5000)  # 20 MiB if the heads leaked
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 8 * 1024


class FreeListMachine(RuleBasedStateMachine):
    """Any history of calls agrees with Python lists: every answer, every refusal, every count."""

    def __init__(self):
        super().__init__()
        self.free_list = native.FreeList(CAPACITY, NUM_CLASSES)
        self.stacks = [[] for _ in range(NUM_CLASSES)]
        self.out = []
        self.num_issued = 0

    @rule()
    def bump(self):
        if self.num_issued == CAPACITY:
            assert self.free_list.bump() is None
            return
        assert self.num_issued == self.free_list.bump()
        self.out.append(self.num_issued)
        self.num_issued += 1

    @rule(size_class=st.integers(0, NUM_CLASSES - 1))
    def pop(self, size_class):
        stack = self.stacks[size_class]
        wanted = stack.pop() if stack else None
        assert wanted == self.free_list.pop(size_class)
        if wanted is not None:
            self.out.append(wanted)

    @rule(size_classes=st.lists(st.integers(0, NUM_CLASSES - 1), max_size=5))
    def take(self, size_classes):
        before = [list(stack) for stack in self.stacks]
        try:
            wanted = [self.stacks[size_class].pop() for size_class in size_classes]
        except IndexError:
            self.stacks, wanted = before, None
        assert wanted == self.free_list.take(size_classes)
        self.out += wanted or []

    @precondition(lambda self: self.out)
    @rule(data=st.data(), size_class=st.integers(0, NUM_CLASSES - 1))
    def push(self, data, size_class):
        extent_id = self.out.pop(data.draw(st.integers(0, len(self.out) - 1), label="which"))
        self.free_list.push(size_class, extent_id)
        self.stacks[size_class].append(extent_id)

    @rule(extent_id=st.integers(0, CAPACITY - 1), size_class=st.integers(0, NUM_CLASSES - 1))
    def push_what_is_not_out(self, extent_id, size_class):
        if extent_id in self.out:
            return
        reason = "never issued" if extent_id >= self.num_issued else "pushed twice"
        with pytest.raises(ValueError, match=reason):
            self.free_list.push(size_class, extent_id)

    @invariant()
    def counts_agree(self):
        assert self.num_issued == self.free_list.num_issued
        counts = [self.free_list.count(size_class) for size_class in range(NUM_CLASSES)]
        assert [len(stack) for stack in self.stacks] == counts
        assert self.num_issued == len(self.out) + sum(counts)


test_any_history_agrees_with_the_model = FreeListMachine.TestCase
test_any_history_agrees_with_the_model.settings = settings(max_examples=30, deadline=None)
