"""Named sets of a tenant's documents.

That a document is in a set stands in the document's own record, so that it changes, expires and
goes with the document, in one transaction; a set itself is a name and what is said of it. Knows no
chunks and no texts.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from chunkcache.catalog_counters import TenantCounters
from chunkcache.catalog_records import (
    InfoRecord,
    Membership,
    decode_metadata,
    document_info,
    encode_metadata,
    info_key,
    read_record,
    scan_infos,
)
from chunkcache.collection_values import (
    Collection,
    CollectionRecord,
    CollectionSize,
    Member,
    collection_key,
    collection_prefix,
)
from chunkcache.documents import Metadata, check_metadata
from chunkcache.errors import (
    CollectionNotFoundError,
    DocumentNotFoundError,
    InvalidValueError,
    QuotaExceededError,
)
from chunkcache.identity import TenantNamespace
from chunkcache.quota import DocumentSize
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.records import decoded, encode_record
from chunkcache.store.transaction import Database, Transaction

MAX_COLLECTIONS: Final = 1_000
"""Of one tenant."""
MAX_MEMBERSHIPS: Final = 100
"""Collections that one document may be in."""
MAX_NAME_CHARS: Final = 512


class DocumentCollections:
    """One tenant's sets of documents.

    Args:
        env: The store.
        namespace: The tenant.
        counters: Its numbers.
        clock: Unix seconds now.
    """

    def __init__(
        self,
        env: StoreEnvironment,
        namespace: TenantNamespace,
        counters: TenantCounters,
        clock: Callable[[], float],
    ) -> None:
        self._env = env
        self._namespace = namespace
        self._counters = counters
        self._clock = clock

    def create(
        self,
        name: str,
        *,
        description: str = "",
        metadata: Metadata | None = None,
        document_ids: Iterable[str] = (),
    ) -> Collection:
        """Make a set.

        Args:
            name: What people call it.
            description: What it is for.
            metadata: A JSON object.
            document_ids: What is in it from the start.

        Raises:
            InvalidValueError: An argument is not acceptable.
            DocumentNotFoundError: A document is not there; no set was made.
            QuotaExceededError: There are too many sets, or the documents' records grow too large.
            StoreReadOnlyError: The store was opened for reading alone.
        """
        _check_name(name, "name")
        _check_name(description, "description")
        check_metadata(metadata or {})
        now = self._clock()
        record = CollectionRecord(
            collection_id=f"vs_{secrets.token_hex(12)}",
            name=name,
            description=description,
            metadata=encode_metadata(metadata or {}),
            created_at=now,
        )
        wanted = tuple(dict.fromkeys(document_ids))

        def body(txn: Transaction) -> None:
            if (
                sum(1 for _ in txn.scan(Database.DOCUMENTS, collection_prefix(self._namespace)))
                >= MAX_COLLECTIONS
            ):
                raise QuotaExceededError(f"there are {MAX_COLLECTIONS} collections already")
            self._put(txn, record)
            self._counters.count(txn, 0, DocumentSize())
            for document_id in wanted:
                self._add(txn, record.collection_id, document_id, None, now)

        self._env.update(body)
        return _collection(record)

    def get(self, collection_id: str) -> Collection:
        """A set.

        Raises:
            CollectionNotFoundError: There is none of that id.
        """
        with self._env.read() as txn:
            return _collection(self._require(txn, collection_id))

    def list(self) -> "list[Collection]":
        """Every set, the oldest first; without damaged ones."""
        with self._env.read() as txn:
            items = txn.scan(Database.DOCUMENTS, collection_prefix(self._namespace))
            found = [decoded(data, CollectionRecord) for _, data in items]
        sets = [_collection(record) for record in found if record is not None]
        return sorted(sets, key=lambda c: (c.created_at, c.collection_id))

    def update(
        self,
        collection_id: str,
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Metadata | None = None,
    ) -> Collection:
        """Say other things of a set; what is None stays.

        Raises:
            InvalidValueError: An argument is not acceptable.
            CollectionNotFoundError: There is no such set.
        """
        _check_name(name or "", "name")
        _check_name(description or "", "description")
        check_metadata(metadata or {})

        def body(txn: Transaction) -> CollectionRecord:
            old = self._require(txn, collection_id)
            new = replace(
                old,
                name=old.name if name is None else name,
                description=old.description if description is None else description,
                metadata=old.metadata if metadata is None else encode_metadata(metadata),
            )
            self._put(txn, new)
            return new

        return _collection(self._env.update(body))

    def delete(self, collection_id: str) -> None:
        """Remove a set; its documents stay.

        Raises:
            CollectionNotFoundError: There is no such set.
        """

        def body(txn: Transaction) -> None:
            self._require(txn, collection_id)
            txn.delete(Database.DOCUMENTS, collection_key(self._namespace, collection_id))
            infos = list(scan_infos(txn, self._namespace))
            for info in infos:
                self._remove(txn, collection_id, info)

        self._env.update(body, frees=True)

    def sizes(self) -> Mapping[str, CollectionSize]:
        """What is in each set that holds a document; expired ones are none."""
        now = self._clock()
        sizes: dict[str, CollectionSize] = {}
        with self._env.read() as txn:
            for info in scan_infos(txn, self._namespace):
                for m in () if info.is_expired(now) else info.memberships:
                    size = sizes.get(m.collection_id, CollectionSize())
                    sizes[m.collection_id] = CollectionSize(
                        size.num_documents + 1, size.num_bytes + info.num_bytes
                    )
        return sizes

    def members(self, collection_id: str) -> Sequence[Member]:
        """The documents of a set, in order of their ids; expired ones are none.

        Raises:
            CollectionNotFoundError: There is no such set.
        """
        now = self._clock()
        with self._env.read() as txn:
            self._require(txn, collection_id)
            return [
                Member(document_info(info), m.added_at, decode_metadata(m.attributes))
                for info in scan_infos(txn, self._namespace)
                for m in info.memberships
                if m.collection_id == collection_id and not info.is_expired(now)
            ]

    def member(self, collection_id: str, document_id: str) -> Member:
        """One document of a set.

        Raises:
            CollectionNotFoundError: There is no such set.
            DocumentNotFoundError: The document is not in it, or not there at all.
        """
        with self._env.read() as txn:
            self._require(txn, collection_id)
            info = self._info(txn, document_id)
            for m in info.memberships:
                if m.collection_id == collection_id:
                    return Member(document_info(info), m.added_at, decode_metadata(m.attributes))
        raise _missing(document_id)

    def add(
        self, collection_id: str, document_id: str, attributes: Metadata | None = None
    ) -> Member:
        """Put a document into a set; one that is in it already stays, with other attributes.

        Args:
            collection_id: The set.
            document_id: The document.
            attributes: What is said of it there; None keeps what was said.

        Raises:
            CollectionNotFoundError: There is no such set.
            DocumentNotFoundError: There is no such document.
            InvalidValueError: The attributes are not acceptable, or it is in too many sets.
            QuotaExceededError: The documents' records grow too large.
        """
        check_metadata(attributes or {})
        now = self._clock()

        def body(txn: Transaction) -> None:
            self._require(txn, collection_id)
            self._add(txn, collection_id, document_id, attributes, now)

        self._env.update(body)
        return self.member(collection_id, document_id)

    def remove(self, collection_id: str, document_id: str) -> None:
        """Take a document out of a set; the document stays.

        Raises:
            CollectionNotFoundError: There is no such set.
            DocumentNotFoundError: The document is not in it.
        """

        def body(txn: Transaction) -> None:
            self._require(txn, collection_id)
            if not self._remove(txn, collection_id, self._info(txn, document_id)):
                raise _missing(document_id)

        self._env.update(body)

    def _add(
        self,
        txn: Transaction,
        collection_id: str,
        document_id: str,
        attributes: Metadata | None,
        now: float,
    ) -> None:
        info = self._info(txn, document_id)
        by_id = {m.collection_id: m for m in info.memberships}
        old = by_id.get(collection_id, Membership(collection_id, now, b"{}"))
        said = old.attributes if attributes is None else encode_metadata(attributes)
        by_id[collection_id] = Membership(collection_id, old.added_at, said)
        if len(by_id) > MAX_MEMBERSHIPS:
            raise InvalidValueError(
                f"a document is in at most {MAX_MEMBERSHIPS} collections", param="file_id"
            )
        self._rewrite(txn, info, tuple(by_id.values()))

    def _remove(self, txn: Transaction, collection_id: str, info: InfoRecord) -> bool:
        """Whether it was in the set."""
        kept = tuple(m for m in info.memberships if m.collection_id != collection_id)
        if kept == info.memberships:
            return False
        self._rewrite(txn, info, kept)
        return True

    def _rewrite(
        self, txn: Transaction, info: InfoRecord, memberships: tuple[Membership, ...]
    ) -> None:
        old_size = self._counters.size_of(txn, info)
        key = info_key(self._namespace, info.document_id)
        txn.put(Database.DOCUMENTS, key, encode_record(replace(info, memberships=memberships)))
        self._counters.count(txn, 0, self._counters.size_of(txn, info) - old_size)

    def _info(self, txn: Transaction, document_id: str) -> InfoRecord:
        key, what = info_key(self._namespace, document_id), f"document {document_id!r}"
        info = read_record(txn, Database.DOCUMENTS, key, InfoRecord, what)
        if info is None or info.is_expired(self._clock()):
            raise _missing(document_id)
        return info

    def _require(self, txn: Transaction, collection_id: str) -> CollectionRecord:
        key = collection_key(self._namespace, collection_id)
        record = read_record(txn, Database.DOCUMENTS, key, CollectionRecord, "a collection")
        if record is None:
            raise CollectionNotFoundError(
                f"there is no collection {collection_id!r}", param="vector_store_id"
            )
        return record

    def _put(self, txn: Transaction, record: CollectionRecord) -> None:
        key = collection_key(self._namespace, record.collection_id)
        txn.put(Database.DOCUMENTS, key, encode_record(record))


def _check_name(text: str, param: str) -> None:
    if len(text) > MAX_NAME_CHARS or not (text.isprintable() or not text):
        raise InvalidValueError(
            f"a {param} has at most {MAX_NAME_CHARS} printable characters", param=param
        )


def _collection(record: CollectionRecord) -> Collection:
    return Collection(
        collection_id=record.collection_id,
        name=record.name,
        description=record.description,
        metadata=decode_metadata(record.metadata),
        created_at=record.created_at,
    )


def _missing(document_id: str) -> DocumentNotFoundError:
    return DocumentNotFoundError(f"there is no document {document_id!r}", param="document_id")
