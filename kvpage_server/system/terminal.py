"""Output in a terminal: tables, colours, times and JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from kvpage_server.system.program import as_printed, prints_every_character
from kvpage_server.system.text import name_as_text, printable

_NO_TERMINAL = 1 << 24  # columns of a pipe or a file, where no line wraps
_PADDED = 64  # characters to which a column is padded at most in a pipe or a file


class Terminal(Console):
    """A rich Console that raises BrokenPipeError for a closed pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich is handling."""
        raise


out = Terminal(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _NO_TERMINAL)


class LineTable(Table):
    """A rich Table without a frame. Without a terminal, each row is one line with its whole text.

    There, a cell that is wider than _PADDED does not widen its column, so one long name does not make every line long.
    """

    def __init__(self, *, show_header: bool = False) -> None:
        """Create a table without columns."""
        super().__init__(box=None, header_style="bold", pad_edge=False, show_header=show_header)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return Table.__rich_console__(self, console, options) if console.is_terminal else self._lines(console)

    def _lines(self, console: Console) -> RenderResult:
        """Yield the header, if it is shown, and each row as a line."""
        headers = [(column.header,) if self.show_header else () for column in self.columns]
        texts = [
            [_plain(console, cell) for cell in (*header, *column.cells)]
            for header, column in zip(headers, self.columns, strict=True)
        ]
        widths = [max((width for text in some if (width := cell_len(text)) <= _PADDED), default=0) for some in texts]
        for row in zip(*texts, strict=True):
            padded = [
                (text, " " * (width - cell_len(text)), column.justify == "right")
                for column, text, width in zip(self.columns, row, widths, strict=True)
            ]
            cells = [f"{space}{text}" if is_number else f"{text}{space}" for text, space, is_number in padded]
            yield Segment((" " * _GAP).join(cells).rstrip())
            yield Segment.line()


class FittingTable(LineTable):
    """A LineTable that removes columns and cuts text to fit into the terminal."""

    def __init__(self, drop: Sequence[str]) -> None:
        """Create a table without columns. `drop` has the headers of columns in the order in which they are removed.

        After them, the other columns are removed, the last one first; the first column always stays.
        """
        super().__init__(show_header=True)
        self._drop = drop

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            return self._lines(console)
        shown = copy(self)
        shown.columns = self._fitting(options.max_width)
        return Table.__rich_console__(shown, console, options)

    def _fitting(self, room: int) -> list[Column]:
        """Return copies of the columns that fit into `room` characters, each with its width set."""
        columns = [*self.columns]
        rest = [column for column in reversed(columns[1:]) if column.header not in self._drop]
        dropped = iter([*(column for name in self._drop for column in columns if column.header == name), *rest])
        while sum(map(_least_width, columns)) + _GAP * (len(columns) - 1) > room and len(columns) > 1:
            columns.remove(next(dropped))
        widths = [_width(column) for column in columns]
        while (excess := sum(widths) + _GAP * (len(columns) - 1) - room) > 0:
            most = max(range(len(widths)), key=lambda i: (columns[i].justify == "left", widths[i]))
            if widths[most] <= 1:
                break
            widths[most] = max(widths[most] - excess, min(_least_width(columns[most]), widths[most] - 1))
        fitted = [
            replace(column, no_wrap=True, overflow="ellipsis", _index=index) for index, column in enumerate(columns)
        ]
        for column, width in zip(fitted, widths, strict=True):
            column.width = width
        return fitted


_GAP = 2  # characters between two columns
_LEAST_NAME = 12  # characters: a column of text is cut to this width before a column is dropped


def _plain(console: Console, cell: RenderableType) -> str:
    """Return the text of a table's cell without styles."""
    return cell.plain if isinstance(cell, Text) else console.render_str(str(cell)).plain


def _width(column: Column) -> int:
    cells = [column.header, *column.cells]
    return max(cell_len(cell.plain if isinstance(cell, Text) else str(cell)) for cell in cells)


def _least_width(column: Column) -> int:
    """Return the width to which a column may be cut. Columns of numbers are not cut."""
    return min(_width(column), _LEAST_NAME) if column.justify == "left" else _width(column)


def table_of(*columns: str, numbers_from: int, drop: Sequence[str] = ()) -> Table:
    """Return a table with these column headers. The columns from index `numbers_from` on are aligned to the right.

    A narrow terminal removes the columns of `drop` in their order, then the last ones.
    """
    made = FittingTable(drop)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i >= numbers_from else "left", overflow="fold")
    return made


def print_json(found: Any) -> None:
    """Print an object as JSON on one line. Names may be bytes, see `name_as_text`."""
    escapes = not prints_every_character()
    printed = json.dumps(found, default=name_as_text, ensure_ascii=escapes)
    if not printed.isprintable():  # control characters could act on a terminal
        printed = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in printed)
    print(printed, flush=True)


def readable(name: bytes | str, most: int | None = None) -> Text:
    """Return a name from a client, such as a request id, with escapes for characters that the terminal cannot print.

    In a terminal, it is cut to `most` characters. The escapes are made here, before a table computes the width of its
    columns.
    """
    printed = as_printed(printable(name_as_text(name) if isinstance(name, bytes) else name))
    is_cut = most is not None and len(printed) > most and out.is_terminal
    return Text(f"{printed[: most - 1]}…" if is_cut and most else printed)


def when(unix_ms: int) -> str:
    """Return a time and its age as text. `unix_ms` is in unix milliseconds."""
    at = datetime.fromtimestamp(unix_ms / 1000)
    ago = time.time() - unix_ms / 1000
    return f"{at:%Y-%m-%d %H:%M:%S} ({for_people(ago)} ago)" if ago >= 1 else "just now"


def for_people(seconds: float) -> str:
    """Return a duration in seconds as text: its two largest units that are not zero, for example "2 h 5 min"."""
    seconds = int(seconds)
    units = {"d": seconds // 86400, "h": seconds // 3600 % 24, "min": seconds // 60 % 60, "s": seconds % 60}
    shown = [f"{count} {unit}" for unit, count in units.items() if count]
    return " ".join(shown[:2]) or "0 s"
