"""A pre-caching run, live on stderr: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from chunkcache_api.cli.console import messages, printable, say
from chunkcache_api.cli.precache_meter import PrecacheMeter

if TYPE_CHECKING:
    from chunkcache.precache import PrecacheProgress

LINE_INTERVAL_SECONDS = 5.0
_ITEM_WIDTH = 32


class PrecacheDisplay:
    """Shows what a meter measures; a context manager.

    Args:
        meter: Told of everything first.
    """

    def __init__(self, meter: PrecacheMeter) -> None:
        self._meter = meter
        self._is_live = messages.is_terminal
        self._last_line_at = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[item]}", markup=False, style="dim"),
            console=messages,
            transient=True,
            disable=not self._is_live,
        )
        self._task: TaskID = self._bar.add_task(
            "", total=max(meter.total_bytes, 1), figures="", item=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def take(self, progress: "PrecacheProgress") -> None:
        """Show a report of the run."""
        self._meter.take(progress)
        figures = _figures(progress, self._meter)
        if self._is_live:
            name = Text(printable(progress.item))
            name.truncate(_ITEM_WIDTH, overflow="ellipsis")
            self._bar.update(
                self._task, completed=self._meter.reached_bytes, figures=figures, item=name.plain
            )
            return
        self._say_now_and_then(f"{figures}  {progress.item}")

    def note(self, line: str) -> None:
        """Show what is going on while the run has nothing to report."""
        if self._is_live:
            self._bar.update(self._task, figures=line, item="")
        else:
            self._say_now_and_then(line)

    def _say_now_and_then(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_line_at >= LINE_INTERVAL_SECONDS:
            self._last_line_at = now
            say(line)


def _figures(progress: "PrecacheProgress", meter: PrecacheMeter) -> str:
    done = f"{progress.documents + progress.failures}/{meter.num_items} documents"
    if progress.chunks_to_prepare:
        done = f"{progress.prepared_chunks}/{progress.chunks_to_prepare} chunks looked at"
    parts = [
        done,
        f"{progress.prefilled_chunks} chunks prefilled",
        f"{meter.tokens_per_second:,.0f} tokens/s",
    ]
    if progress.failures:
        parts.insert(1, f"{progress.failures} failed")
    remaining = meter.remaining_seconds
    if remaining is not None:
        parts.append(f"about {duration(remaining)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """A span of time for people: ``40 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
