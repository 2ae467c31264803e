"""A pre-caching run of the command line: items with their sizes, shown live, stoppable."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chunkcache_api.cli.precache_display import PrecacheDisplay
from chunkcache_api.cli.precache_meter import PrecacheMeter, SizedItem
from chunkcache_api.cli.retrieval import make_neighbours
from chunkcache_api.cli.stopping import StopRequest

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.results import PrecacheSummary


def find_items(paths: Sequence[Path]) -> list[SizedItem]:
    """What there is to cache under some paths, and how large it is."""
    from chunkcache.text_files import TextFile, find_text_files

    return [
        SizedItem(item, _file_bytes(item.path) if isinstance(item, TextFile) else 0)
        for item in find_text_files(paths)
    ]


def run_precache(
    cache: "ChunkCache", sized_items: Sequence[SizedItem], stop: StopRequest
) -> "PrecacheSummary":
    """Cache items, showing progress on stderr.

    Raises:
        ModelFilesError: The preparation needs the embedder, which is not installed.
        StoreError: The store failed; what was finished is kept.
    """
    meter = PrecacheMeter(sized_items)
    with PrecacheDisplay(meter) as display:
        return cache.precache(
            (sized.item for sized in sized_items),
            neighbours=make_neighbours(cache, display.note),
            on_progress=display.take,
            should_stop=stop.is_set,
        )


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it reports why
