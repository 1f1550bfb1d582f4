"""How much was dumped, or restored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Amount:
    """Pages, plain strings, and the bytes of all of them."""

    pages: int = 0
    strings: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int, *, are_pages: bool) -> None:
        """Add a number of pages or strings, and their bytes together."""
        self.nbytes += nbytes
        if are_pages:
            self.pages += count
        else:
            self.strings += count
