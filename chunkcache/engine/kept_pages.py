"""Pages of finished prompts, kept under digests: what is held, whose it is, what goes first.

Pages are shared with the requests that wrote them; nothing is copied. They give way when pages are
wanted, the least recently used first. Knows nothing of how a prompt is put together.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from chunkcache.errors import StoreError
from chunkcache.identity import ChunkId, TenantNamespace
from chunkcache.pages import PageLease, PagePool
from chunkcache.results import FusionReport

HeldChunks = Callable[[TenantNamespace, Iterable[ChunkId]], set[ChunkId]]
"""Which of some chunks of a tenant a document holds."""


@dataclass(frozen=True)
class KeptStats:
    """A snapshot of what is kept.

    Attributes:
        tokens: Token slots of kept pages; those shared with requests in flight included.
        hits: Requests that began with kept pages.
        evictions: Pieces that gave way to others or to requests.
    """

    tokens: int
    hits: int
    evictions: int


@dataclass(frozen=True)
class KeptEnd:
    """What a prompt came to: with its pages, all that answering it again takes.

    Attributes:
        logits: fp32 ``[vocab]`` behind its last token.
        report: What was reused and run the first time.
    """

    logits: torch.Tensor
    report: FusionReport


@dataclass(frozen=True)
class KeptPiece:
    """Some pages of a prompt.

    Attributes:
        namespace: Whose it is.
        pages: In logical order.
        chunk_ids: Chunks of documents that it holds a trace of: it goes with any of them.
        uses: Per token what it is to a prompt that begins with it; empty for a full prefill's.
        end: What the prompt came to, if it ends here.
    """

    namespace: TenantNamespace
    pages: tuple[int, ...]
    chunk_ids: frozenset[ChunkId]
    uses: bytes = b""
    end: KeptEnd | None = None


class KeptPages:
    """The kept pages of one pool. Any thread may call any method.

    Args:
        pool: Where the pages are.
        max_pages: How many may be kept; 0 keeps nothing.
        held_chunks: Tells which chunks are still there.

    Attributes:
        max_pages: How many may be kept.
        lock: Held by whoever needs several calls to see one state.
    """

    def __init__(self, pool: PagePool, max_pages: int, held_chunks: HeldChunks) -> None:
        self.max_pages = max_pages
        self.lock = threading.RLock()
        self._pool = pool
        self._held_chunks = held_chunks
        # Least recently used first.
        self._pieces: OrderedDict[bytes, KeptPiece] = OrderedDict()
        self._holders: Counter[int] = Counter()
        self._num_hits = self._num_evictions = 0
        pool.make_room = self.make_room

    def get(self, key: bytes) -> KeptPiece | None:
        """A piece; its place in the order stays."""
        with self.lock:
            return self._pieces.get(key)

    def add(self, key: bytes, piece: KeptPiece) -> None:
        """Keep a piece, whose pages somebody owns, in place of another of that key."""
        with self.lock:
            self._pool.keep(piece.pages)
            self._holders.update(piece.pages)
            before = self._pieces.pop(key, None)
            if before is not None:
                self._give_up(before)
            self._pieces[key] = piece

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use: the first of them goes last."""
        with self.lock:
            for key in reversed(keys):
                self._pieces.move_to_end(key)

    def trim(self) -> None:
        """Let the oldest go until no more is kept than may be."""
        with self.lock:
            while len(self._holders) > self.max_pages:
                self._evict_oldest()

    def share(self, pages: Sequence[int], num_tokens: int) -> PageLease:
        """A lease of kept pages for a sequence that begins with ``num_tokens`` of their tokens."""
        return self._pool.share(pages, num_tokens)

    def note_hit(self) -> None:
        """Count a request that begins with kept pages."""
        with self.lock:
            self._num_hits += 1

    def make_room(self, num_pages: int) -> None:
        """Let the oldest go until nobody owns so many pages, if that can be had."""
        with self.lock:
            if self._pool.num_free_pages < num_pages:
                return  # requests in flight hold too many: it would be for nothing
            while self._pieces and self._pool.num_unowned_pages < num_pages:
                self._evict_oldest()

    def drop_gone(self) -> None:
        """Drop what holds a trace of a chunk that no document holds any more."""
        with self.lock:
            wanted: dict[TenantNamespace, set[ChunkId]] = {}
            for piece in self._pieces.values():
                if piece.chunk_ids:
                    wanted.setdefault(piece.namespace, set()).update(piece.chunk_ids)
            for namespace, chunk_ids in wanted.items():
                try:
                    gone = chunk_ids - self._held_chunks(namespace, chunk_ids)
                except StoreError:
                    gone = chunk_ids  # nobody can tell: better run them again
                if gone:
                    self._drop(lambda piece, gone=gone: piece.chunk_ids & gone)

    def drop_tenant(self, namespace: TenantNamespace) -> int:
        """Drop what is a tenant's; says how many token slots went."""
        with self.lock:
            return self._drop(lambda piece: piece.namespace == namespace)

    def clear(self) -> None:
        """Drop everything."""
        with self.lock:
            self._drop(lambda piece: True)

    def traces(self) -> frozenset[ChunkId]:
        """Every chunk that anything kept holds a trace of."""
        with self.lock:
            return frozenset().union(*(p.chunk_ids for p in self._pieces.values()))

    def stats(self) -> KeptStats:
        """A snapshot."""
        with self.lock:
            num_tokens = len(self._holders) * self._pool.page_tokens
            return KeptStats(num_tokens, self._num_hits, self._num_evictions)

    def check_integrity(self) -> None:
        """Assert that the pages add up."""
        with self.lock:
            held = Counter(page for piece in self._pieces.values() for page in piece.pages)
            assert held == self._holders, (held, self._holders)
            assert held.total() == self._pool.num_kept_pages
            assert len(held) <= self.max_pages

    def _evict_oldest(self) -> None:
        _, piece = self._pieces.popitem(last=False)
        self._give_up(piece)
        self._num_evictions += 1

    def _drop(self, is_dropped: Callable[[KeptPiece], object]) -> int:
        num_before = len(self._holders)
        for key in [key for key, piece in self._pieces.items() if is_dropped(piece)]:
            self._give_up(self._pieces.pop(key))
        return (num_before - len(self._holders)) * self._pool.page_tokens

    def _give_up(self, piece: KeptPiece) -> None:
        self._pool.give_up(piece.pages)
        for page in piece.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
