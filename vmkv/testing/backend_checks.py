"""The backend contract, as numbered checks that every implementation passes.

Each check states one sentence of `vmkv/core/backend/base.py` and gives back all it took. Faults are
not checked, since they kill the process or the context: access before it was granted, after an
unmap, and writes with read access only.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.backend import Backend, BackendUsage
from ..errors import VMKVError
from . import mapping_checks, order_checks, sharing_checks
from .tools import expect

#: The contract, in reading order.
BACKEND_CHECKS: tuple[Callable[[Backend], None], ...] = (
    mapping_checks.check_identity,
    mapping_checks.check_reservations,
    mapping_checks.check_free_is_exact,
    mapping_checks.check_two_reservations_are_two,
    mapping_checks.check_free_with_mapping,
    mapping_checks.check_address_space_ends,
    mapping_checks.check_sizes,
    mapping_checks.check_handles,
    mapping_checks.check_fresh_memory_is_zero,
    mapping_checks.check_map_and_unmap,
    mapping_checks.check_memory_outlives_mapping,
    mapping_checks.check_aliases,
    mapping_checks.check_release_while_mapped,
    mapping_checks.check_map_over_mapping,
    mapping_checks.check_map_outside_reservation,
    mapping_checks.check_map_is_whole,
    mapping_checks.check_unmap_is_whole,
    mapping_checks.check_runs,
    mapping_checks.check_access_needs_mapping,
    mapping_checks.check_access_can_change,
    order_checks.check_execute_nothing,
    order_checks.check_execute_maps_is_atomic,
    order_checks.check_execute_unmaps_reports,
    order_checks.check_copy,
    order_checks.check_copy_many,
    order_checks.check_fill,
    order_checks.check_fences,
    order_checks.check_streams,
    order_checks.check_calls_are_counted,
    order_checks.check_threads,
    sharing_checks.check_locations,
    sharing_checks.check_cpu_access,
    sharing_checks.check_fill_spans_locations,
    sharing_checks.check_swap_in_place,
    sharing_checks.check_import_reads_export,
    sharing_checks.check_shared_memory_is_frozen,
    sharing_checks.check_export_is_for_shareable,
    sharing_checks.check_import_is_exact,
)


def check_backend(make_backend: Callable[[], Backend]) -> int:
    """Check a backend against the contract; each check gets a fresh one and leaves it empty.

    Args:
        make_backend: Opens the backend under test.

    Returns:
        The number of checks run.

    Raises:
        AssertionError: The first rule that is broken, by number and sentence.
    """
    for number, check in enumerate(BACKEND_CHECKS, 1):
        backend = make_backend()
        try:
            expect(BackendUsage(), backend.usage(), "usage of a fresh backend")
            check(backend)
            expect(BackendUsage(), backend.usage(), "usage after everything was given back")
            backend.close()
            backend.close()
        except (VMKVError, AssertionError) as error:
            sentence = (check.__doc__ or check.__name__).strip()
            raise AssertionError(f"check {number}: {sentence} But: {error}") from error
    return len(BACKEND_CHECKS)
