"""Opening a cache for one command, with a sign of life on stderr meanwhile."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunkcache_api.cli.console import messages, printable, say

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache


@dataclass(frozen=True)
class OpenedCache:
    """A cache, and what opening it took.

    Attributes:
        cache: Ready for use.
        load_seconds: Loading the model, opening the store and passing the gate.
    """

    cache: "ChunkCache"
    load_seconds: float


@contextmanager
def open_cache(**settings: Any) -> Iterator[OpenedCache]:
    """Open a store with a model; closed at the end of the block.

    Args:
        **settings: Fields of ``Settings``; None takes the environment's value or the default.

    Raises:
        ChunkCacheError: As ``ChunkCache.open`` does.
    """
    log_to_stderr()
    with progress_lines("starting") as show:
        from chunkcache.chunk_cache import ChunkCache

        began = time.perf_counter()
        cache = ChunkCache.open(progress=show, **settings)
        opened = OpenedCache(cache, time.perf_counter() - began)
    with cache:
        yield opened


@contextmanager
def progress_lines(title: str) -> Iterator[Callable[[str], None]]:
    """Gives what shows one line of progress: beside a spinner, or as a line where none can turn."""
    with messages.status(printable(title)) as spinner:

        def show(line: str) -> None:
            if messages.is_terminal:
                spinner.update(printable(line))
            else:
                say(line)

        yield show


def log_to_stderr() -> None:
    """Send logs to stderr: stdout is for a command's result alone."""
    import structlog

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        # Looked up for each line: whoever redirects stderr gets the lines from then on.
        logger_factory=lambda *names: structlog.PrintLogger(sys.stderr),
    )
