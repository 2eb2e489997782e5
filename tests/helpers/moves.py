"""Moves of a sequence's memory that keep its tokens; each returns the sequence to go on with."""

from __future__ import annotations

from pathlib import Path

from vmkv import Sequence


def swapped(sequence: Sequence, folder: Path) -> Sequence:
    """Swap out and in."""
    sequence.swap_out()
    assert not sequence.is_resident
    sequence.swap_in()
    return sequence


def saved(sequence: Sequence, folder: Path) -> Sequence:
    """Save to `folder`, close, and load."""
    sequence.save(folder / "kv")
    sequence.close()
    sequence.cache.trim()
    return sequence.cache.load(folder / "kv")


def saved_while_swapped_out(sequence: Sequence, folder: Path) -> Sequence:
    """Save from host memory, close, and load."""
    sequence.swap_out()
    return saved(sequence, folder)


def forked(sequence: Sequence, folder: Path) -> Sequence:
    """Fork; the source stays open."""
    return sequence.fork()
