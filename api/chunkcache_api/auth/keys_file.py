"""The file of hashed API keys: read whole, written whole, readable by its owner alone."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from chunkcache.errors import InvalidValueError
from chunkcache.identity import DIGEST_BYTES
from chunkcache.settings import Settings
from chunkcache_api.auth.api_key import ApiKey, Scope
from chunkcache_api.errors import KeysFileError

DEFAULT_NAME: Final = "keys.json"
MAX_BYTES: Final = 16 << 20

_VERSION: Final = 1


class _KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    digest: str
    tenant: str
    scopes: list[Scope]
    created_at: float
    name: str | None = None
    expires_at: float | None = None


class _FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: list[_KeyRecord]


def keys_path(settings: Settings) -> Path:
    """Where the keys of a store are: as set, or in the store's directory."""
    given = settings.keys_file
    return (Path(settings.store) / DEFAULT_NAME if given is None else given).expanduser()


def read_keys(path: Path) -> Mapping[str, ApiKey]:
    """The keys of a file, by their ids, in the file's order.

    Raises:
        KeysFileError: It cannot be read, is not a file of keys, or anybody may write to it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise KeysFileError(f"the keys file {path} cannot be read: {reason}") from error
    if mode & stat.S_IWOTH:
        raise KeysFileError(
            f"every user of this machine may write to the keys file {path}: look at what it holds, "
            f"then run: chmod 600 {path}"
        )
    try:
        if len(data) > MAX_BYTES:
            raise InvalidValueError(f"it is over {MAX_BYTES} bytes")
        return _decode(data)
    except (ValueError, InvalidValueError) as error:
        raise KeysFileError(f"the keys file {path} is damaged: {error}") from error


def change_keys(path: Path, change: Callable[[dict[str, ApiKey]], None]) -> None:
    """Change a file's keys as a whole; made if there is none yet. Concurrent changes wait.

    Args:
        path: The file.
        change: Changes the keys, which it is given by their ids.

    Raises:
        KeysFileError: It cannot be read or written; it is as it was.
        Exception: Whatever ``change`` raises; it is as it was.
    """
    try:
        # A link stays a link: what it points at is replaced, and held against other changes,
        # those that come by another link too.
        target = path.resolve()
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(target.parent):
            keys = dict(read_keys(target)) if target.exists() else {}
            change(keys)
            _replace(target, _encode(list(keys.values())))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise KeysFileError(f"the keys file {path} cannot be written: {reason}") from error


def _decode(data: bytes) -> Mapping[str, ApiKey]:
    record = msgspec.json.decode(data, type=_FileRecord)
    if record.version != _VERSION:
        raise InvalidValueError(f"it is of version {record.version}, not {_VERSION}")
    keys: dict[str, ApiKey] = {}
    for key in record.keys:
        digest = bytes.fromhex(key.digest)
        if len(digest) != DIGEST_BYTES or key.id in keys:
            raise InvalidValueError(f"key {key.id!r} has no digest of its own")
        keys[key.id] = ApiKey(
            key.id,
            digest,
            key.tenant,
            frozenset(key.scopes),
            key.name,
            key.created_at,
            key.expires_at,
        )
    return keys


def _encode(keys: Sequence[ApiKey]) -> bytes:
    records = [
        _KeyRecord(
            id=key.key_id,
            digest=key.digest.hex(),
            tenant=key.tenant,
            scopes=sorted(key.scopes),
            created_at=key.created_at,
            name=key.name,
            expires_at=key.expires_at,
        )
        for key in keys
    ]
    return msgspec.json.format(msgspec.json.encode(_FileRecord(_VERSION, records))) + b"\n"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory against other changes: the file itself is replaced by each."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    """Write a file beside, with mode 0600, and put it in place: it is never there in part."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
