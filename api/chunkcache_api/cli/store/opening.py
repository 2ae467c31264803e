"""Opening a store without a model, and showing how far long work on it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from chunkcache_api.cli.opening import progress_lines

if TYPE_CHECKING:
    from chunkcache.store.environment import StoreEnvironment

ShowProgress = Callable[[str, int, int], None]
_STEPS = 20


@contextmanager
def open_store(store: Path | None, *, read_only: bool) -> "Iterator[StoreEnvironment]":
    """A store that exists, by its path or the settings'.

    Raises:
        StoreError: There is none, or it cannot be used.
    """
    from chunkcache.errors import StoreError
    from chunkcache.settings import load_settings
    from chunkcache.store.environment import StoreEnvironment

    settings = load_settings(store=store)
    path = Path(settings.store).expanduser()
    # None of these commands makes a store: a mistyped path would pass for an empty one.
    if not (path / "data.mdb").is_file():
        raise StoreError(f"there is no store in {path}")
    with StoreEnvironment.open(
        path, max_bytes=settings.store_max_bytes, read_only=read_only or settings.read_only
    ) as env:
        yield env


@contextmanager
def showing_steps(title: str) -> Iterator[ShowProgress]:
    """Gives what shows counted progress on stderr: at most twenty lines for each kind of thing."""
    with progress_lines(title) as show:
        shown: dict[str, int] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            step = done * _STEPS // max(total, 1)
            if shown.get(what) != step:
                shown[what] = step
                show(f"{what}: {done:,} of {total:,}" if total > 1 else what)

        yield on_progress
