"""The keys that a running server accepts: the file's, read again when it changes.

A file that has become unreadable changes nothing: the keys of before go on, and it is said so.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import structlog

from chunkcache_api.auth.api_key import ApiKey, id_of, key_digest
from chunkcache_api.auth.keys_file import read_keys
from chunkcache_api.errors import InvalidApiKeyError, KeysFileError

RefusalReason = Literal["missing", "unknown", "expired", "scope"]

_log = structlog.get_logger("chunkcache.api")

_NO_FILE: Final = (0, 0, 0, 0)


@dataclass(frozen=True)
class KeyRingStats:
    """A snapshot.

    Attributes:
        num_keys: Keys in force.
        is_stale: Whether the file has changed and could not be read.
        refused: Requests that were refused, by reason.
    """

    num_keys: int
    is_stale: bool
    refused: Mapping[RefusalReason, int]


class KeyRing:
    """The keys in force. Any thread may call any method.

    Args:
        path: The file; None for a server that never has keys.
        is_required: Whether the file has to be there from the start.
        now: The time, in Unix seconds.

    Raises:
        KeysFileError: The file is there and cannot be read, or is required and missing.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        is_required: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        self._keys: Mapping[str, ApiKey] | None = None
        self._seen = _NO_FILE
        self._is_stale = False
        self._refused: Counter[RefusalReason] = Counter()
        if path is not None and (is_required or _is_there(path)):
            self._seen = _state(path)
            self._keys = read_keys(path)

    @property
    def is_open(self) -> bool:
        """Whether no key is needed: there has never been a file of keys."""
        with self._lock:
            self._reload()
            return self._keys is None

    def identify(self, presented: str | None) -> ApiKey:
        """The key that a client presents.

        Raises:
            InvalidApiKeyError: It presents none, an unknown one, or one that has expired. The
                client is told the same of the latter two.
        """
        with self._lock:
            self._reload()
            key = None if self._keys is None else self._keys.get(id_of(presented or ""))
        if presented is None:
            self.count_refusal("missing")
            raise InvalidApiKeyError("an API key is needed: send authorization: Bearer KEY")
        if key is None:
            key_digest(presented)  # as much work as for a known one
            reason: RefusalReason = "unknown"
        elif not key.opens_with(presented):
            reason = "unknown"
        elif key.is_expired(self._now()):
            reason = "expired"
        else:
            return key
        self.count_refusal(reason)
        raise InvalidApiKeyError("the API key is not valid")

    def count_refusal(self, reason: RefusalReason) -> None:
        """Count a request that was refused."""
        with self._lock:
            self._refused[reason] += 1

    def stats(self) -> KeyRingStats:
        """A snapshot."""
        with self._lock:
            self._reload()
            return KeyRingStats(len(self._keys or ()), self._is_stale, dict(self._refused))

    def _reload(self) -> None:
        """Read the file again if it is not what it was when it was last read."""
        path = self._path
        if path is None or (state := _state(path)) == self._seen:
            return
        self._seen = state
        try:
            keys = read_keys(path)
        except KeysFileError as error:
            self._is_stale = True
            if self._keys is None:
                self._keys = {}  # somebody wants keys: what cannot be read must not open the door
            _log.error("keys_not_reloaded", reason=error.message)
            return
        self._keys, self._is_stale = keys, False
        _log.info("keys_reloaded", num_keys=len(keys))


def _is_there(path: Path) -> bool:
    """Whether somebody wants keys: a link that points nowhere, or a closed directory, is no no."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _state(path: Path) -> tuple[int, int, int, int]:
    """Changes with every replacement of a file, and with every write to it."""
    try:
        found = os.stat(path)
    except OSError:
        return _NO_FILE
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
