"""The page pool: where the keys and values of requests in flight live.

Interval map of one layer's slots (half open, ``S`` = page_tokens)::

    slot:   0        S        2S       3S   ...            num_pages * S
            [ page 0 )[ page 1 )[ page 2 )[ ...                          )
    owner:  pool (free) | PageLease (used); several where sequences begin alike

A sequence of ``n`` tokens owns ``ceil(n / S)`` pages; its token ``t`` (which is also its position)
lives at slot ``pages[t // S] * S + t % S``. Slots past the last token, and all slots of free
pages, hold whatever was there before: readers must never look at them.

Sequences that begin alike share the whole pages of their common tokens, which nobody writes to any
more; the page on which they part is copied (:meth:`PagePool.branch`).

A keeper may own pages too, so that a later sequence can begin with them. It gives them up when pages
run short: to whoever asks for pages, those that only the keeper owns are free.
"""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from chunkcache.errors import ContextLengthExceededError
from chunkcache.model.spec import ModelSpec


class PageLease:
    """Pages owned by one sequence until :meth:`release` (idempotent; a lost lease leaks pages).

    Attributes:
        pages: Page ids in logical order.
        num_tokens: Token slots asked for.
        slots: int64 ``[num_tokens]``: slot of each token.
    """

    def __init__(self, pool: "PagePool", pages: tuple[int, ...], num_tokens: int) -> None:
        self._pool = pool
        self._released = False
        self.pages = pages
        self.num_tokens = num_tokens
        page_tokens = pool.page_tokens
        starts = torch.tensor(pages, dtype=torch.int64, device=pool.k.device) * page_tokens
        offsets = torch.arange(page_tokens, device=pool.k.device)
        self.slots = (starts[:, None] + offsets).flatten()[:num_tokens]

    def release(self) -> None:
        """Give the pages back; further calls do nothing."""
        if not self._released:
            self._released = True
            self._pool.take_back(self.pages)

    def hand_over(self) -> None:
        """The pages are another lease's; from now on :meth:`release` does nothing."""
        assert not self._released, "pages were handed over after their release"
        self._released = True

    def __enter__(self) -> "PageLease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class PagePool:
    """A fixed number of pages, for keys and for values of every layer.

    The memory is reserved, not touched: pages cost RAM only once something is written to them,
    and low pages are handed out first. A run of consecutive pages is preferred, because
    attention reads consecutive slots as a view.

    Args:
        spec: Model geometry.
        num_tokens: Capacity in token slots, rounded up to whole pages.
        page_tokens: Slots per page.
        dtype: Dtype of the slots.
        device: Where they are.

    Attributes:
        k: ``[num_layers, num_pages, page_tokens, num_kv_heads, head_dim]``, rotated keys.
        v: Same shape, values.
        page_tokens: Slots per page.
        num_pages: Pages in the pool.
        make_room: Asked to have so many pages that nobody owns, as far as a keeper can.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_tokens: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_tokens = page_tokens
        self.num_pages = -(-num_tokens // page_tokens)
        shape = (spec.num_layers, self.num_pages, page_tokens, spec.num_kv_heads, spec.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self._free = bytearray(b"\x01" * self.num_pages)
        self._num_owners = [0] * self.num_pages
        self._num_keepers = [0] * self.num_pages
        self.make_room: Callable[[int], None] = lambda num_pages: None
        self._lock = threading.Lock()

    @property
    def num_free_pages(self) -> int:
        """Pages that a sequence may have: nobody's, and those that only a keeper owns."""
        pairs = zip(self._num_owners, self._num_keepers, strict=True)
        return sum(owners == keepers for owners, keepers in pairs)

    @property
    def num_unowned_pages(self) -> int:
        """Pages nobody owns."""
        return self._free.count(1)

    @property
    def num_kept_pages(self) -> int:
        """How often a keeper owns a page, over all pages."""
        return sum(self._num_keepers)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` slots need."""
        return -(-num_tokens // self.page_tokens)

    def allocate(self, num_tokens: int) -> PageLease | None:
        """Take pages for a sequence.

        Returns:
            A lease, or None if there are not enough free pages now.

        Raises:
            ContextLengthExceededError: More than the whole pool: it could never succeed.
        """
        wanted = self.pages_for(num_tokens)
        if wanted > self.num_pages:
            raise ContextLengthExceededError(
                f"{num_tokens} token slots asked for, the pool has "
                f"{self.num_pages * self.page_tokens}"
            )
        if self.num_unowned_pages < wanted:
            self.make_room(wanted)
        with self._lock:
            if self.num_unowned_pages < wanted:
                return None
            run = self._free.find(b"\x01" * wanted)
            if run >= 0:
                pages = tuple(range(run, run + wanted))
            else:
                pages = tuple(i for i, free in enumerate(self._free) if free)[:wanted]
            for page in pages:
                self._free[page] = 0
                self._num_owners[page] = 1
        return PageLease(self, pages, num_tokens)

    def share(self, pages: Sequence[int], num_tokens: int) -> PageLease:
        """A lease of pages that somebody owns, as the beginning of another sequence.

        Args:
            pages: In logical order.
            num_tokens: Tokens of theirs that the sequence begins with.
        """
        with self._lock:
            self._add_owner(pages)
        return PageLease(self, tuple(pages), num_tokens)

    def keep(self, pages: Sequence[int]) -> None:
        """Have a keeper own pages that somebody owns, too; for :attr:`make_room` to give up."""
        with self._lock:
            self._add_owner(pages)
            for page in pages:
                self._num_keepers[page] += 1

    def give_up(self, pages: Sequence[int]) -> None:
        """Undo :meth:`keep`, once."""
        with self._lock:
            for page in pages:
                assert self._num_keepers[page] > 0, f"page {page} was given up twice"
                self._num_keepers[page] -= 1
            self._drop_owner(pages)

    def branch(
        self, trunk: PageLease, own: PageLease, num_tokens: int, *, share: bool
    ) -> PageLease:
        """A sequence that begins as another does, and goes on in pages of its own.

        What is not shared is copied; the common tokens are written already, and neither sequence
        writes to them again. Only for the thread that writes to the pages.

        Args:
            trunk: The other sequence.
            own: Free pages, at least for the tokens that are not shared; handed over.
            num_tokens: Length of the common beginning.
            share: Whether whole pages of it are shared; no where a sequence may yet be run again.
        """
        num_shared = num_tokens // self.page_tokens if share else 0
        shared = trunk.pages[:num_shared]
        copied = trunk.slots[num_shared * self.page_tokens : num_tokens]
        # First, as it may fail: the pages have changed owners only where a lease of them comes back.
        for tensor in (self.k, self.v):
            flat = tensor.flatten(1, 2)
            flat[:, own.slots[: len(copied)]] = flat[:, copied]
        lease = PageLease(
            self, shared + own.pages, (len(shared) + len(own.pages)) * self.page_tokens
        )
        with self._lock:
            self._add_owner(shared)
        own.hand_over()
        return lease

    def take_back(self, pages: tuple[int, ...]) -> None:
        """Have one owner less for each page, and free those without any; called by a lease, once."""
        with self._lock:
            self._drop_owner(pages)

    def _add_owner(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._num_owners[page] > 0, f"page {page} is nobody's"
            self._num_owners[page] += 1

    def _drop_owner(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._num_owners[page] > self._num_keepers[page], (
                f"page {page} was given back twice"
            )
            self._num_owners[page] -= 1
            self._free[page] = self._num_owners[page] == 0

    def check_integrity(self) -> None:
        """Assert that no sequence owns a page; for when nothing is in flight.

        A keeper's pages are for the keeper to answer for.
        """
        assert self.num_free_pages == self.num_pages, (
            f"{self.num_pages - self.num_free_pages} pages are still owned"
        )
