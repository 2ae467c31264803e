"""What a tier of entries promises, and every reason for which it may not have one.

A tier here is a store *behind* the host's memory (disk, remote). The host tier hands out leases
instead and has its own contract in :mod:`chunkcache.store.host`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Protocol

from chunkcache.entry import Entry
from chunkcache.errors import StoreError
from chunkcache.identity import ChunkKey, EntryIdentity


class MissReason(StrEnum):
    """Why a lookup gave no entry. Stable: these are label values of a metric."""

    ABSENT = "absent"
    FORMAT_VERSION = "format_version"
    CORRUPT_HEADER = "corrupt_header"
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"
    SHAPE = "shape"
    FOREIGN_MODEL = "foreign_model"
    FOREIGN_NAMESPACE = "foreign_namespace"
    PREPARATION_MISMATCH = "preparation_mismatch"
    CODEC_MISMATCH = "codec_mismatch"
    TOKEN_IDS_MISMATCH = "token_ids_mismatch"
    SLOWER_THAN_PREFILL = "slower_than_prefill"
    """It is on disk, and computing it anew is quicker here than reading it."""
    UNREADABLE = "unreadable"
    """The store as a whole could not be read."""
    TOO_LARGE = "too_large"
    """The remote has it, and it is larger than what is read from there."""
    REMOTE_UNAVAILABLE = "remote_unavailable"
    """The remote, which may have it, did not answer in time, or is left alone for a while."""


class NotStored(StrEnum):
    """Why a computed entry was served but not kept. Stable, like :class:`MissReason`."""

    NON_FINITE = "non_finite"
    STORE_FULL = "store_full"
    OVER_BUDGET = "over_budget"
    """The entries on disk are worth more, or are held, and their budget has no room beside them."""
    STORE_ERROR = "store_error"
    READ_ONLY = "read_only"
    """The store was opened for reading alone."""
    DROPPED = "dropped"
    """Its key was dropped (its document deleted) while it was being computed."""
    UNOWNED = "unowned"
    """The caller's guard said that nothing refers to it any more."""

    @property
    def is_about_the_disk(self) -> bool:
        """Whether the entry is sound and wanted all the same, so that RAM may keep it."""
        return self in (
            NotStored.STORE_FULL,
            NotStored.OVER_BUDGET,
            NotStored.STORE_ERROR,
            NotStored.READ_ONLY,
        )


class NonFiniteEntryError(StoreError):
    """The entry holds NaN or infinities; keeping it would poison every later answer."""

    code: ClassVar[str] = "non_finite_entry"
    status: ClassVar[int] = 500


class UnownedEntryError(Exception):
    """A guard refused an entry; never leaves the store."""


class OverBudgetError(Exception):
    """The budget for entries has no room for one more; never leaves the store."""


class Tier(Protocol):
    """A store of whole entries. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """Label of the tier in stats and responses."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that live entries occupy."""
        ...

    @property
    def num_entries(self) -> int:
        """Live entries, damaged ones that nobody has met yet included."""
        ...

    def get(self, identity: EntryIdentity) -> Entry | MissReason:
        """Read an entry into memory of its own.

        A damaged or foreign entry is removed from the tier, so that it is met once.

        Args:
            identity: What is wanted. Each of its fields, token ids included, is compared with what
                is stored; a matching key alone proves nothing.

        Returns:
            The entry, which nothing in the tier aliases, or why there is none.
        """
        ...

    def put(self, entry: Entry) -> bool:
        """Keep an entry.

        Returns:
            Whether it was written; ``False`` where a sound one is there already.

        Raises:
            NonFiniteEntryError: It holds NaN or infinities.
            StoreFullError: There is no room; nothing was kept.
        """
        ...

    def delete(self, key: ChunkKey) -> bool:
        """Remove an entry; says whether there was one."""
        ...

    def check_integrity(self) -> Sequence[tuple[ChunkKey, MissReason]]:
        """Read everything and name what is damaged. Changes nothing."""
        ...
