"""Pages of finished full prefills, kept so that prompts which begin alike start from them.

A tree of blocks: a block's key is the digest of the block before it and of its own tokens, its root
the tenant's. Blocks share pages with the requests that ran them; nothing is copied. They give way
when pages are wanted, the least recently used first. Fused pages never enter: what they hold is not
a function of the tokens alone.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkcache.errors import StoreError
from chunkcache.fusion.full_prefill import BLOCK_TOKENS
from chunkcache.fusion.plan import FusionPlan
from chunkcache.identity import (
    ChunkId,
    TenantNamespace,
    TokenizerDigest,
    chunk_id,
    digest_fields,
    encode_token_ids,
)
from chunkcache.pages import PageLease, PagePool

HeldChunks = Callable[[TenantNamespace, Iterable[ChunkId]], set[ChunkId]]
"""Which of some chunks of a tenant a document holds."""


@dataclass(frozen=True)
class KeptStats:
    """A snapshot of what is kept.

    Attributes:
        tokens: Tokens in kept blocks; pages shared with requests in flight included.
        hits: Requests that began with kept blocks.
        evictions: Blocks that gave way to others or to requests.
    """

    tokens: int
    hits: int
    evictions: int


@dataclass(frozen=True)
class _Block:
    """One block.

    Attributes:
        namespace: Whose it is.
        end: One past its last position.
        pages: Those that its tokens are in, in logical order; the first may hold tokens before it.
        chunk_ids: Chunks of documents that begin before its end: it holds a trace of each.
    """

    namespace: TenantNamespace
    end: int
    pages: tuple[int, ...]
    chunk_ids: frozenset[ChunkId]


class KeptPrompts:
    """The kept blocks of one model's pool. Any thread may call any method but :meth:`keep`.

    Args:
        pool: Where the pages are.
        max_pages: Pages that may be kept; 0 keeps nothing.
        tokenizer: Digest of the model's tokenizer, which chunks are named under.
        held_chunks: Tells which chunks are still there.
    """

    def __init__(
        self,
        pool: PagePool,
        max_pages: int,
        tokenizer: TokenizerDigest,
        held_chunks: HeldChunks,
    ) -> None:
        self._pool = pool
        self._max_pages = max_pages
        self._tokenizer = tokenizer
        self._held_chunks = held_chunks
        self._lock = threading.RLock()
        # Least recently used first; a block always stands before the one it follows, so that what
        # goes first is never the middle of a path.
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._num_pages = self._num_hits = self._num_evictions = 0
        pool.make_room = self.make_room

    def num_ready(self, plan: FusionPlan, namespace: TenantNamespace) -> int:
        """Tokens at the front of a prompt that kept blocks hold; 0 for a plan that fuses."""
        with self._lock:
            return len(self._path(plan, namespace)) * BLOCK_TOKENS

    def find(self, plan: FusionPlan, namespace: TenantNamespace) -> PageLease | None:
        """The longest beginning of a prompt that is kept, at least its last token left out.

        Returns:
            A lease of as many tokens, or None.
        """
        with self._lock:
            path = self._path(plan, namespace)
            if not path:
                return None
            self._touch(path)
            num_tokens = len(path) * BLOCK_TOKENS
            pages = [-1] * self._pool.pages_for(num_tokens)
            for index, key in enumerate(path):
                # A page of two blocks: the later one's holds both.
                first = index * BLOCK_TOKENS // self._pool.page_tokens
                own = self._blocks[key].pages
                pages[first : first + len(own)] = own
            return self._pool.share(pages, num_tokens)

    def note_hit(self) -> None:
        """Count a request that begins with what :meth:`find` gave."""
        with self._lock:
            self._num_hits += 1

    def keep(self, plan: FusionPlan, namespace: TenantNamespace, lease: PageLease) -> None:
        """Keep the whole blocks of a prompt that has run in full. On the thread that owns the pages.

        Args:
            plan: What ran.
            namespace: Whose it is.
            lease: The prompt's pages; the sequence may go on in them behind the prompt.
        """
        if not self._may_keep(plan):
            return
        page_tokens = self._pool.page_tokens
        keys = self._keys(plan, namespace, plan.layout.prompt_end)
        starts = self._chunk_starts(plan)
        with self._lock:
            for index, key in enumerate(keys):
                if key in self._blocks:
                    continue
                start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
                pages = lease.pages[start // page_tokens : self._pool.pages_for(end)]
                self._pool.keep(pages)
                self._num_pages += len(pages)
                chunk_ids = frozenset(c for begin, c in starts if begin < end)
                self._blocks[key] = _Block(namespace, end, pages, chunk_ids)
            self._touch(keys)
            while self._num_pages > self._max_pages:
                self._evict_oldest()
        # Behind the blocks' entry: a document that goes meanwhile is seen here, or sees them.
        self.drop_gone()

    def make_room(self, num_pages: int) -> None:
        """Let blocks go until nobody owns so many pages, if that can be had."""
        with self._lock:
            if self._pool.num_free_pages < num_pages:
                return  # requests in flight hold too many: it would be for nothing
            while self._blocks and self._pool.num_unowned_pages < num_pages:
                self._evict_oldest()

    def drop_gone(self) -> None:
        """Drop what holds a chunk that no document holds any more."""
        with self._lock:
            wanted: dict[TenantNamespace, set[ChunkId]] = {}
            for block in self._blocks.values():
                if block.chunk_ids:
                    wanted.setdefault(block.namespace, set()).update(block.chunk_ids)
            for namespace, chunk_ids in wanted.items():
                try:
                    gone = chunk_ids - self._held_chunks(namespace, chunk_ids)
                except StoreError:
                    gone = chunk_ids  # nobody can tell: better run them again
                if gone:
                    self._drop(lambda block, gone=gone: block.chunk_ids & gone)

    def drop_tenant(self, namespace: TenantNamespace) -> int:
        """Drop what is a tenant's; says how many tokens went."""
        with self._lock:
            return self._drop(lambda block: block.namespace == namespace)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._drop(lambda block: True)

    def stats(self) -> KeptStats:
        """A snapshot."""
        with self._lock:
            num_tokens = len(self._blocks) * BLOCK_TOKENS
            return KeptStats(num_tokens, self._num_hits, self._num_evictions)

    def check_integrity(self) -> None:
        """Assert that every block but a first follows another, and that the pages add up."""
        with self._lock:
            assert self._num_pages == sum(len(b.pages) for b in self._blocks.values())
            assert self._num_pages == self._pool.num_kept_pages
            assert self._num_pages <= self._max_pages

    def _may_keep(self, plan: FusionPlan) -> bool:
        return (
            self._max_pages > 0 and not plan.policy.places_entries and plan.mask_positions is None
        )

    def _path(self, plan: FusionPlan, namespace: TenantNamespace) -> list[bytes]:
        """Keys of the kept blocks that a prompt begins with, from the root on."""
        if not self._may_keep(plan) or not self._blocks:
            return []
        path: list[bytes] = []
        for key in self._keys(plan, namespace, plan.layout.prompt_end - 1):
            if key not in self._blocks:
                break
            path.append(key)
        return path

    def _keys(self, plan: FusionPlan, namespace: TenantNamespace, end: int) -> list[bytes]:
        """Keys of the whole blocks of a prompt's first tokens."""
        token_ids = plan.layout.token_ids
        key = digest_fields("kept prompts", [("namespace", namespace)])
        keys = []
        for start in range(0, end - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            tokens = encode_token_ids(token_ids[start : start + BLOCK_TOKENS])
            key = digest_fields("kept block", [("before", key), ("token_ids", tokens)])
            keys.append(key)
        return keys

    def _chunk_starts(self, plan: FusionPlan) -> list[tuple[int, ChunkId]]:
        """Chunks of documents, with their first positions."""
        return [
            (s.start, chunk_id(i.namespace, self._tokenizer, i.token_ids))
            for s, i in zip(plan.layout.chunks, plan.identities, strict=True)
            if not i.is_loose
        ]

    def _touch(self, path: list[bytes]) -> None:
        for key in reversed(path):
            self._blocks.move_to_end(key)

    def _evict_oldest(self) -> None:
        _, block = self._blocks.popitem(last=False)
        self._give_up(block)
        self._num_evictions += 1

    def _drop(self, is_dropped: Callable[[_Block], object]) -> int:
        """Drop blocks; those that follow them hold what they hold, and go too."""
        keys = [key for key, block in self._blocks.items() if is_dropped(block)]
        for key in keys:
            self._give_up(self._blocks.pop(key))
        return len(keys) * BLOCK_TOKENS

    def _give_up(self, block: _Block) -> None:
        self._pool.give_up(block.pages)
        self._num_pages -= len(block.pages)
