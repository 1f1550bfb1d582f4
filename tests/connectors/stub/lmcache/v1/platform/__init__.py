from __future__ import annotations

import os


class EventNotifier:
    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def notify(self) -> None:
        os.write(self._write, b"1")

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def create_event_notifier() -> EventNotifier:
    return EventNotifier()
