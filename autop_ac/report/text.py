"""Text and HTML of reports: fixed width, ASCII, the same on a terminal, in a file and in a log."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Of all text: it does not wrap on a terminal of that width."""

NAME_WIDTH = 42
"""A longer name in a table goes on in the next line, behind a dot of it."""


def size(count: int) -> str:
    """Bytes for people: ``"1.50 MiB"``."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: ``"1.50 ms"``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def wrapped(line: str) -> str:
    """A line of prose at the width of reports; what follows the first is indented two more."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def broken(name: str, width: int = NAME_WIDTH) -> str:
    """A dotted name in lines of at most that width, broken behind dots; what follows is indented."""
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        if len(lines[-1]) + len(part) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += part
    return "\n".join(lines)


def table_text(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> str:
    """A table as text.

    Args:
        headings: one per column.
        rows: cells; a line break in a cell is kept, and names too long for the first column are broken
            at dots. Nothing is read as markup.
        right: columns that are set to the right.
    """
    table = Table(box=box.ASCII2)
    for i, heading in enumerate(headings):
        side = i in right
        table.add_column(
            Text(heading), justify="right" if side else "left", no_wrap=side, overflow="fold"
        )
    for name, *cells in rows:
        table.add_row(*map(Text, (broken(name), *cells)))
    out = io.StringIO()
    console = Console(
        file=out, width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def table_html(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML, everything escaped."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{_lines(cell)}</td>' for cell in cells)}</tr>" for cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _lines(cell: str) -> str:
    return html.escape(cell).replace("\n", "<br>")
