"""The contract of eviction: which residents go for a newcomer, and whether it is let in at all.

Policies know keys, bytes, tokens and the order of uses. They hold no entry and free nothing: the
tier that asks does, and serialises the calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkcache.identity import ChunkKey

MayEvict = Callable[[ChunkKey], bool]
"""Whether a resident can go now: not while it is leased or pinned."""


@dataclass(frozen=True)
class Candidate:
    """What a policy knows of an entry.

    Attributes:
        key: Its key.
        num_bytes: What it occupies.
        saved_tokens: Rows that a prefill runs to compute it again.
    """

    key: ChunkKey
    num_bytes: int
    saved_tokens: int

    def __post_init__(self) -> None:
        """An entry occupies something and saves something."""
        assert self.num_bytes > 0, self.num_bytes
        assert self.saved_tokens > 0, self.saved_tokens


class EvictionPolicy(ABC):
    """Decides for one tier. Not locked."""

    @abstractmethod
    def record_use(self, candidate: Candidate) -> None:
        """Note one use of an entry, resident or not; for a newcomer, before :meth:`victims`."""

    @abstractmethod
    def victims(
        self, newcomer: Candidate, needed_bytes: int, may_evict: MayEvict, *, must_admit: bool
    ) -> list[ChunkKey] | None:
        """Choose what goes for a newcomer.

        Removes nothing from the policy's books: the tier calls :meth:`remove` for each.

        Args:
            newcomer: Not resident.
            needed_bytes: To free; what may be evicted suffices for it. More than 0.
            may_evict: Asked of each victim.
            must_admit: Let it in whatever it is worth.

        Returns:
            Keys that free at least ``needed_bytes``; None if the newcomer is not worth it.
        """

    @abstractmethod
    def add(self, candidate: Candidate) -> None:
        """The entry is resident from now on."""

    def restore(self, candidate: Candidate, num_uses: int) -> None:
        """The entry is resident since before this policy's time, and was used so often.

        Called in the order of last uses.
        """
        del num_uses
        self.record_use(candidate)
        self.add(candidate)

    @abstractmethod
    def remove(self, key: ChunkKey, *, is_evicted: bool) -> None:
        """The entry is resident no more.

        Args:
            key: A resident.
            is_evicted: It may come back, and its history counts then; otherwise it is forgotten.
        """

    def forget(self, key: ChunkKey) -> None:
        """An entry that is not resident is wanted no more; what is remembered of it goes."""
        del key

    def expect_use(self, key: ChunkKey, in_seconds: float) -> None:
        """A caller says when an entry is used next. Policies that cannot weigh it ignore it."""
        del key, in_seconds

    @abstractmethod
    def residents(self) -> Iterable[ChunkKey]:
        """Keys that the policy holds to be resident, for checks."""
