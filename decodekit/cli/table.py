"""A table for people to read: columns of equal width, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["render_table"]


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the table of ``rows``, the first of them the header; the first column is text."""
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = (
        "|" + "|".join("-" * (w + 1) + ("-" if c == 0 else ":") for c, w in enumerate(widths)) + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])
