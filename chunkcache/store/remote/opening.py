"""Opens the remote tier that a URL names.

Knows which backend speaks to what, which package each needs, and the times between them.
"""

from collections.abc import Callable

from chunkcache.errors import MissingExtraError, StoreError
from chunkcache.settings import Settings
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.remote import outbox
from chunkcache.store.remote.address import RemoteAddress
from chunkcache.store.remote.backend import Backend, RemoteFailure
from chunkcache.store.remote.breaker import CircuitBreaker
from chunkcache.store.remote.calls import RemoteCalls
from chunkcache.store.remote.remote_cache import RemoteCache
from chunkcache.store.remote.tier import RemoteTier
from chunkcache.store.remote.worker import RemoteWorker


def open_backend(address: RemoteAddress, timeout_s: float) -> Backend:
    """The backend of an address; nothing is asked of the remote yet.

    Raises:
        MissingExtraError: Its package is not installed.
        StoreError: It cannot be used as it stands.
    """
    try:
        if address.kind == "redis":
            from chunkcache.store.remote.redis_store import RedisBackend

            return RedisBackend(address, timeout_s)
        from chunkcache.store.remote.object_store import ObjectStoreBackend

        return ObjectStoreBackend(address, timeout_s)
    except ImportError as error:
        raise MissingExtraError(
            f"the remote {address.shown} needs: pip install 'chunkcache[remote]'", param="remote"
        ) from error
    except RemoteFailure as error:
        raise StoreError(f"the remote {address.shown} cannot be used ({error.kind})") from error


def open_configured_remote(
    settings: Settings, env: StoreEnvironment, progress: Callable[[str], None]
) -> RemoteCache | None:
    """The remote that the settings name, if they name one; errors as of :func:`open_remote`."""
    if settings.remote is None:
        return None
    return open_remote(
        env,
        settings.remote,
        timeout_s=settings.remote_timeout_seconds,
        max_object_bytes=settings.remote_max_object_bytes,
        progress=progress,
    )


def open_remote(
    env: StoreEnvironment,
    url: str,
    *,
    timeout_s: float,
    max_object_bytes: int,
    backend: Backend | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RemoteCache:
    """A remote tier behind a store. A remote that does not answer is no error.

    Args:
        env: The store.
        url: Where the remote is.
        timeout_s: Seconds that a request may wait for it. Sending may take ten times that, and at
            least half a minute.
        max_object_bytes: Larger objects are neither read nor written.
        backend: Speaks to it; None is the one that the URL names.
        progress: Told what somebody should know.

    Raises:
        InvalidValueError: The URL is none that a remote can have.
        MissingExtraError: A package is not installed.
        StoreError: The store cannot be written, or the directory not be made.
    """
    address = RemoteAddress.parse(url)
    write_timeout_s = max(10 * timeout_s, 30.0)
    quick = backend or open_backend(address, timeout_s)
    patient = backend or open_backend(address, write_timeout_s)
    if not env.read_only:
        former = env.update(lambda txn: outbox.set_address(txn, address.shown))
        with env.read() as txn:
            _, to_remove = outbox.count_owed(txn)
        if former is not None and to_remove:
            progress(
                f"the store's remote was {former}: {to_remove} entries were still to be removed "
                f"there; they are removed from {address.shown} instead"
            )
    reads = RemoteCalls(quick, timeout_s, CircuitBreaker())
    writes = RemoteCalls(patient, write_timeout_s, CircuitBreaker())
    tier = RemoteTier(reads, writes, max_object_bytes, lambda key: worker.remove_damaged(key))
    worker = RemoteWorker(env, tier, reads.breaker, writes.breaker, 2 * write_timeout_s)
    return RemoteCache(env, address.shown, tier, reads, writes, worker)
