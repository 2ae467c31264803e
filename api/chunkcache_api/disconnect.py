"""Stops a worker when its client goes away."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from chunkcache_api.workers import Cancellable


@contextmanager
def cancelled_on_disconnect(work: Cancellable, receive: Receive) -> Iterator[None]:
    """Watch the connection while the body of the ``with`` runs.

    The one listener of a request, once its body has been read. It only shortens the wait: who
    uses it still ends ``work`` on every way out.

    Args:
        work: Cancelled when the client disconnects.
        receive: The request's ASGI channel.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
