"""S3, Google Cloud Storage, Azure and plain directories, by ``obstore``.

Knows the library; knows nothing of entries. Credentials, regions and endpoints come from the
environment variables that the providers' own tools read.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from chunkcache.store.remote.address import RemoteAddress
from chunkcache.store.remote.backend import DeclinedError, FailureKind, RemoteFailure

NUM_RETRIES: Final = 3
FIRST_BACKOFF: Final = timedelta(milliseconds=50)
_LIST_BATCH: Final = 1_000
_DENIED: Final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


class ObjectStoreBackend:
    """Satisfies :class:`chunkcache.store.remote.backend.Backend`.

    Args:
        address: Where; a local directory is made if it is not there.
        timeout_s: Seconds that one call may take.
    """

    def __init__(self, address: RemoteAddress, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        with _translated():
            if address.scheme == "file":
                directory = Path(unquote(urlsplit(address.url).path))
                self._store: Any = LocalStore(directory, mkdir=True)
            else:
                # Servers fail for a moment now and then; what lasts is the breaker's affair.
                self._store = from_url(
                    address.url,
                    client_options={
                        "timeout": timeout,
                        "connect_timeout": timeout,
                        "allow_http": _endpoint_is_plain(),
                    },
                    retry_config={
                        "max_retries": NUM_RETRIES,
                        "retry_timeout": timeout,
                        "backoff": {
                            "init_backoff": FIRST_BACKOFF,
                            "max_backoff": 4 * FIRST_BACKOFF,
                            "base": 2,
                        },
                    },
                )

    def get(self, name: str, accepts: Callable[[int], bool]) -> bytes | None:
        """See :meth:`chunkcache.store.remote.backend.Backend.get`."""
        with _translated():
            try:
                found = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            if not accepts(found.meta["size"]):
                raise DeclinedError
            return found.bytes().to_bytes()

    def size(self, name: str) -> int | None:
        """See :meth:`chunkcache.store.remote.backend.Backend.size`."""
        with _translated():
            try:
                return obstore.head(self._store, name)["size"]
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`chunkcache.store.remote.backend.Backend.put`."""
        with _translated():
            obstore.put(self._store, name, data, use_multipart=False)

    def delete(self, name: str) -> bool:
        """See :meth:`chunkcache.store.remote.backend.Backend.delete`."""
        if self.size(name) is None:
            return False
        with _translated():
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                return False
        return True

    def names(self) -> Iterator[tuple[str, int]]:
        """See :meth:`chunkcache.store.remote.backend.Backend.names`."""
        with _translated():
            for batch in obstore.list(self._store, chunk_size=_LIST_BATCH):
                yield from ((found["path"], found["size"]) for found in batch)

    def close(self) -> None:
        """Nothing is held."""


def _endpoint_is_plain() -> bool:
    """Whether an environment variable names an endpoint without TLS, which is then what is meant."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RemoteFailure, DeclinedError):
        raise
    except (*_DENIED, PermissionError):
        raise RemoteFailure(FailureKind.DENIED) from None
    except (exceptions.BaseError, OSError, TimeoutError, ValueError) as error:
        raise RemoteFailure(_kind(error)) from None


def _kind(error: Exception) -> FailureKind:
    """The library has one class for most failures; their texts tell them apart."""
    if isinstance(error, TimeoutError):
        return FailureKind.TIMEOUT
    text = str(error).partition("Debug source")[0].lower()
    text = text.replace("retry_timeout", "")  # a setting that it repeats
    if any(word in text for word in ("permission denied", "403", "401", "accessdenied")):
        return FailureKind.DENIED
    if any(word in text for word in ("timed out", "timeout", "operationtimedout")):
        return FailureKind.TIMEOUT
    if any(word in text for word in ("connect", "dns", "error sending request", "network")):
        return FailureKind.UNREACHABLE
    if "no space left" in text or "quota" in text:
        return FailureKind.FULL
    return FailureKind.ERROR
