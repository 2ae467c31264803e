"""A pre-caching run of the command line: items with their sizes, shown live, stoppable."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress

from chunkcache_api.cli.console import messages
from chunkcache_api.cli.precache_display import PrecacheDisplay
from chunkcache_api.cli.precache_meter import PrecacheMeter, SizedItem
from chunkcache_api.cli.retrieval import make_neighbours
from chunkcache_api.cli.stopping import StopRequest

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.precache_estimate import PrecacheEstimate
    from chunkcache.results import PrecacheSummary


def run_precache(
    cache: "ChunkCache",
    sized_items: Sequence[SizedItem],
    stop: StopRequest,
    max_bytes: int | None = None,
) -> "PrecacheSummary":
    """Cache items, showing progress on stderr.

    Args:
        cache: Where to.
        sized_items: What.
        stop: Asks for the end behind the documents at hand.
        max_bytes: Ends as well once so many bytes of entries were written; the documents at hand
            may still go over it.

    Raises:
        ModelFilesError: The preparation needs the embedder, which is not installed.
        StoreError: The store failed; what was finished is kept.
    """
    runtime = cache.runtime
    spec = runtime.model.runner.spec
    token_bytes = runtime.codec.bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    meter = PrecacheMeter(sized_items)

    def is_full() -> bool:
        return max_bytes is not None and meter.prefilled_tokens * token_bytes >= max_bytes

    with PrecacheDisplay(meter) as display:
        return cache.precache(
            (sized.item for sized in sized_items),
            neighbours=make_neighbours(cache, display.note),
            on_progress=display.take,
            should_stop=lambda: stop.is_set() or is_full(),
        )


def run_estimate(
    cache: "ChunkCache", sized_items: Sequence[SizedItem], stop: StopRequest
) -> "PrecacheEstimate":
    """What :func:`run_precache` would take, showing progress on stderr."""
    with Progress(
        "reading and cutting",
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    ) as bar:
        task = bar.add_task("", total=len(sized_items))
        return cache.estimate_precache(
            (sized.item for sized in sized_items),
            on_item=lambda: bar.advance(task),
            should_stop=stop.is_set,
        )
