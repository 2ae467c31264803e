"""The remote tier: whole entries in a backend, under names made from their keys alone.

An object is what the disk tier stores under the same key, bit for bit, and is checked as that is:
header, identity, geometry, a checksum per layer. Knows no disk and no host.
"""

from collections.abc import Callable, Iterator
from typing import Final

from chunkcache.entry import Entry
from chunkcache.identity import ENTRY_FORMAT_VERSION, ChunkKey, EntryIdentity
from chunkcache.store.entry_format import (
    DamagedEntryError,
    check_entry,
    decode_entry,
    encode_entry,
)
from chunkcache.store.remote.backend import Backend, DeclinedError, RemoteFailure
from chunkcache.store.remote.calls import RemoteCalls
from chunkcache.store.tier import MissReason, NonFiniteEntryError

_ROOT: Final = f"entries-{ENTRY_FORMAT_VERSION}/"
_HEX_CHARS: Final = 64


def object_name(key: ChunkKey) -> str:
    """The name of an entry's object. The key's digest covers tenant and model."""
    return f"{_ROOT}{key.hex()[:2]}/{key.hex()}"


def object_key(name: str) -> ChunkKey | None:
    """Invert :func:`object_name`; None for a name that it does not give."""
    digits = name.rpartition("/")[2]
    try:
        key = ChunkKey(bytes.fromhex(digits))
    except ValueError:
        return None
    return key if len(digits) == _HEX_CHARS and object_name(key) == name else None


class RemoteTier:
    """Entries in a backend; satisfies :class:`chunkcache.store.tier.Tier`.

    Every method but :meth:`get` raises ``RemoteFailure`` where the remote does not do its part.

    Args:
        reads: Calls that somebody waits for.
        writes: Calls that nobody waits for.
        max_object_bytes: Larger objects are neither read nor written.
        on_damaged: Told of a key under which something unusable lies; None removes it at once.
    """

    name = "remote"

    def __init__(
        self,
        reads: RemoteCalls,
        writes: RemoteCalls,
        max_object_bytes: int,
        on_damaged: Callable[[ChunkKey], None] | None = None,
    ) -> None:
        self._reads = reads
        self._writes = writes
        self._max_object_bytes = max_object_bytes
        self._on_damaged = on_damaged or self._remove_damaged

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects; lists them."""
        return sum(num_bytes for _, num_bytes in self._objects())

    @property
    def num_entries(self) -> int:
        """Objects, damaged ones included; lists them."""
        return len(self._objects())

    def get(self, identity: EntryIdentity) -> Entry | MissReason:
        """Read an entry; see :meth:`chunkcache.store.tier.Tier.get`."""
        return self.read(identity)[0]

    def read(self, identity: EntryIdentity) -> tuple[Entry | MissReason, int]:
        """As :meth:`get`, with the number of bytes that came."""
        key = identity.key()
        try:
            data = self._fetch(key)
        except DeclinedError:
            return MissReason.TOO_LARGE, 0
        except RemoteFailure:
            return MissReason.REMOTE_UNAVAILABLE, 0
        if data is None:
            return MissReason.ABSENT, 0
        try:
            return decode_entry(data, identity), len(data)
        except DamagedEntryError as error:
            self._on_damaged(key)
            return error.reason, len(data)

    def put(self, entry: Entry) -> bool:
        """Keep an entry; see :meth:`chunkcache.store.tier.Tier.put`."""
        if not entry.is_finite():
            raise NonFiniteEntryError("an entry holds values that are not finite")
        return self.put_encoded(entry.key, bytes(encode_entry(entry)))

    def put_encoded(self, key: ChunkKey, data: bytes) -> bool:
        """Keep an entry's stored bytes.

        Returns:
            Whether they were written: not where there is an object of that name and size (a read
            finds out whether it is sound), nor where they are too large.
        """
        if len(data) > self._max_object_bytes:
            return False
        name = object_name(key)

        def work(backend: Backend) -> bool:
            if backend.size(name) == len(data):
                return False
            backend.put(name, data)
            return True

        return self._writes.call(work)

    def delete(self, key: ChunkKey) -> bool:
        """Remove an entry; says whether there was one."""
        name = object_name(key)
        return self._writes.call(lambda backend: backend.delete(name))

    def check_integrity(self) -> list[tuple[ChunkKey, MissReason]]:
        """Read every object and name what is damaged. Changes nothing."""
        damaged: list[tuple[ChunkKey, MissReason]] = []
        for key, _ in self._objects():
            try:
                data = self._fetch(key)
                if data is not None:
                    check_entry(data, key)
            except DeclinedError:
                damaged.append((key, MissReason.TOO_LARGE))
            except DamagedEntryError as error:
                damaged.append((key, error.reason))
        return damaged

    def answers(self) -> bool:
        """Ask for something that is not there; says whether the remote answered."""
        try:
            self._reads.call(lambda backend: backend.size(f"{_ROOT}probe"))
        except RemoteFailure:
            return False
        return True

    def _fetch(self, key: ChunkKey) -> bytes | None:
        name = object_name(key)
        return self._reads.call(lambda backend: backend.get(name, self._accepts))

    def _accepts(self, num_bytes: int) -> bool:
        return num_bytes <= self._max_object_bytes

    def _objects(self) -> list[tuple[ChunkKey, int]]:
        def work(backend: Backend) -> list[tuple[ChunkKey, int]]:
            return list(_entries(backend.names()))

        return self._writes.call(work)

    def _remove_damaged(self, key: ChunkKey) -> None:
        self._writes.call(lambda backend: backend.delete(object_name(key)))


def _entries(names: Iterator[tuple[str, int]]) -> Iterator[tuple[ChunkKey, int]]:
    for name, num_bytes in names:
        key = object_key(name)
        if key is not None:
            yield key, num_bytes
