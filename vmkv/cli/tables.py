"""Text for a terminal: aligned columns and plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_CHARACTERS = 60


def shown(text: str) -> str:
    """What a user typed, quoted, as far as a line has room for it."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: the first flush left, the others flush right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]

    def written(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([written(lines[0]), rule, *map(written, lines[1:])])
