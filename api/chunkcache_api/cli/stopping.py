"""Stopping a long job: the first signal asks for it, the second one ends the process."""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, Self

from chunkcache_api.cli.console import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopRequest:
    """Handles SIGINT and SIGTERM inside its block, which is on the main thread.

    Args:
        on_abort: Text for stdout if the process is ended by a second signal.
    """

    def __init__(self, on_abort: str = "") -> None:
        self._on_abort = on_abort
        self._is_set = False
        self._previous: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Whether somebody asked to stop."""
        return self._is_set

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Straight to the descriptors: the signal may have come in the middle of a write.
        if not self._is_set:
            self._is_set = True
            _write(2, "\nstopping after the documents at hand; once more to abort\n")
            return
        if sys.stderr.isatty():
            _write(2, _SHOW_CURSOR)
        _write(2, "\naborted; what was finished is kept\n")
        _write(1, self._on_abort)
        # Threads may be deep in a prefill. The store is sound whenever a process ends.
        os._exit(ExitCode.INTERRUPTED)


def _write(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode())
