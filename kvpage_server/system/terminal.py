"""How things are shown to people in a terminal."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpage_server.system.printable import printable
from kvpage_server.system.streams import prints_every_character

_NO_TERMINAL = 200  # columns: a pipe has no edge to wrap at


class Terminal(Console):
    """rich's console, but a closed pipe raises BrokenPipeError instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is handled."""
        raise


out = Terminal(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _NO_TERMINAL)


def table_of(*columns: str, numbers_from: int) -> Table:
    """A table. The columns from `numbers_from` on are numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i >= numbers_from else "left", overflow="fold")
    return made


def print_json(found: Any) -> None:
    """For programs: an object on one line. Bytes that are no text are shown as `\\xNN`."""
    escapes = not prints_every_character()
    said = json.dumps(found, default=lambda raw: raw.decode("utf-8", "backslashreplace"), ensure_ascii=escapes)
    if not said.isprintable():  # it may be read in a terminal, too
        said = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in said)
    print(said, flush=True)


def readable(name: bytes | str, most: int | None = None) -> Text:
    """What the store has from others, such as a request's name, with escapes for what cannot be printed. It is cut
    after `most` letters."""
    said = printable(name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name)
    return Text(said if most is None or len(said) <= most else f"{said[: most - 1]}…")


def when(unix_ms: int) -> str:
    """A moment, and how long ago it was."""
    at = datetime.fromtimestamp(unix_ms / 1000)
    ago = time.time() - unix_ms / 1000
    return f"{at:%Y-%m-%d %H:%M:%S} ({for_people(ago)} ago)" if ago >= 1 else "just now"


def for_people(seconds: float) -> str:
    """A duration in its two largest units."""
    seconds = int(seconds)
    units = {"d": seconds // 86400, "h": seconds // 3600 % 24, "min": seconds // 60 % 60, "s": seconds % 60}
    shown = [f"{count} {unit}" for unit, count in units.items() if count]
    return " ".join(shown[:2]) or "0 s"
