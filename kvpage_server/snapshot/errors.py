"""What can be wrong with a dump."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST_TEXTS = 10_000
NOT_WRITTEN = "its bytes are not those that were written"


class DumpError(ValueError):
    """A directory can't be dumped into or restored from; the message says why, and what to do."""


class BadFile(DumpError):
    """A file is incomplete, corrupt, or not from `kvpage dump`; the message says which, without the file's name."""


@dataclass(slots=True)
class Failures:
    """Files, pages and strings that were left out, and why: the number of all, and the text of the first."""

    count: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if self.count <= _MOST_TEXTS:
            self.texts.append(text)
