"""Redis and Valkey, by ``redis``, whose protocol both speak.

Knows the library; knows nothing of entries. What a full server does is its ``maxmemory-policy``'s
affair: what it evicts is a miss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from chunkcache.store.remote.address import RemoteAddress
from chunkcache.store.remote.backend import DeclinedError, FailureKind, RemoteFailure

KEY_PREFIX: Final = "chunkcache:"
_SCAN_BATCH: Final = 500


class RedisBackend:
    """Satisfies :class:`chunkcache.store.remote.backend.Backend`.

    Args:
        address: Where; user and password may be part of it.
        timeout_s: Seconds that one step of a call may take.
    """

    def __init__(self, address: RemoteAddress, timeout_s: float) -> None:
        url = address.url
        for own, theirs in (("valkey", "redis"), ("valkeys", "rediss")):
            if address.scheme == own:
                url = theirs + url[len(own) :]
        # What failed is tried again by whoever asks next, behind the circuit breaker.
        with _translated():
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )

    def get(self, name: str, accepts: Callable[[int], bool]) -> bytes | None:
        """See :meth:`chunkcache.store.remote.backend.Backend.get`."""
        with _translated():
            num_bytes = self.size(name)
            if num_bytes is None:
                return None
            if not accepts(num_bytes):
                raise DeclinedError
            # A longer one that has just taken its place is cut, and found to be damaged.
            found = self._client.getrange(KEY_PREFIX + name, 0, num_bytes - 1)
            return found or None  # type: ignore[return-value]

    def size(self, name: str) -> int | None:
        """See :meth:`chunkcache.store.remote.backend.Backend.size`."""
        with _translated():
            return self._client.strlen(KEY_PREFIX + name) or None  # type: ignore[return-value]

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`chunkcache.store.remote.backend.Backend.put`."""
        with _translated():
            self._client.set(KEY_PREFIX + name, data)

    def delete(self, name: str) -> bool:
        """See :meth:`chunkcache.store.remote.backend.Backend.delete`."""
        with _translated():
            return bool(self._client.unlink(KEY_PREFIX + name))

    def names(self) -> Iterator[tuple[str, int]]:
        """See :meth:`chunkcache.store.remote.backend.Backend.names`."""
        with _translated():
            seen: set[str] = set()  # a scan may give a key twice
            for key in self._client.scan_iter(f"{KEY_PREFIX}*", count=_SCAN_BATCH):
                name = key.decode().removeprefix(KEY_PREFIX)
                num_bytes = None if name in seen else self.size(name)
                seen.add(name)
                if num_bytes is not None:
                    yield name, num_bytes

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except exceptions.TimeoutError:
        raise RemoteFailure(FailureKind.TIMEOUT) from None
    except (exceptions.AuthenticationError, exceptions.NoPermissionError):
        raise RemoteFailure(FailureKind.DENIED) from None
    except (exceptions.ConnectionError, OSError):
        raise RemoteFailure(FailureKind.UNREACHABLE) from None
    except (exceptions.RedisError, ValueError) as error:
        text = str(error).lower()
        is_denied = any(word in text for word in ("noauth", "wrongpass", "noperm", "read only"))
        is_full = "oom" in text or "maxmemory" in text
        kind = FailureKind.DENIED if is_denied else FailureKind.ERROR
        raise RemoteFailure(FailureKind.FULL if is_full else kind) from None
