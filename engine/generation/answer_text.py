"""The text of an answer as its tokens come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from engine.generation.token_text import Detokenizer


class AnswerText:
    """Text from tokens. What has been read is never taken back: half a character, and a possible beginning of a stop
    string, are held back."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        """`detokenizer`: fresh; the text ends before the first of the `stop` strings."""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._text = ""
        self._read = 0  # characters that `read` has handed out
        self._held = 0  # characters at the end that may be the beginning of a stop string
        self._finished = False
        self.stopped = False

    @property
    def text(self) -> str:
        """All of it, when it is finished, without a stop string and what follows it."""
        return self._text

    def add(self, token: int) -> None:
        self._detokenizer.add_token(token)
        if self._stop:
            self._look()

    def finish(self) -> None:
        """There are no more tokens: what was held back is text now."""
        if not self.stopped:
            self._detokenizer.finalize()
            self._look()
        self._finished = True
        self._held = 0

    def read(self) -> str:
        """The text that is complete since the last call."""
        if not (self._stop or self._finished):
            self._look()
        start, self._read = self._read, len(self._text) - self._held
        return self._text[start : self._read]

    def _look(self) -> None:
        before, self._text = len(self._text), self._detokenizer.text
        start = max(0, before - self._longest)  # what comes before was looked at
        at = min((at for word in self._stop if (at := self._text.find(word, start)) >= 0), default=-1)
        self.stopped = at >= 0
        if self.stopped:
            self._text = self._text[:at]
        self._held = 0 if self.stopped else self._beginning_of_a_stop()

    def _beginning_of_a_stop(self) -> int:
        """How many characters at the end are the beginning of a stop string, at most."""
        lengths = range(min(self._longest - 1, len(self._text)), 0, -1)
        ends = (length for length in lengths if any(word.startswith(self._text[-length:]) for word in self._stop))
        return next(ends, 0)
