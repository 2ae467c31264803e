"""Pages for requests that begin: all that each may ever need, kept prompts' blocks among them."""

from chunkcache.engine.kept_prompts import KeptPrompts
from chunkcache.engine.request import ActiveRequest
from chunkcache.engine.solo import SoloRunner
from chunkcache.errors import ContextLengthExceededError
from chunkcache.pages import PagePool


class PageReserve:
    """Gives requests their pages. :meth:`take` is for the engine's thread alone.

    Args:
        pool: Where the pages are.
        solo: Knows what further answers need.
        kept: Blocks that prompts may begin with.
    """

    def __init__(self, pool: PagePool, solo: SoloRunner, kept: KeptPrompts) -> None:
        self._pool = pool
        self._solo = solo
        self._kept = kept

    def check(self, request: ActiveRequest) -> None:
        """Refuse what would wait for pages for ever.

        Raises:
            ContextLengthExceededError: The pool has fewer pages than the request needs.
        """
        pool, num_others = self._pool, len(request.others)
        num_own = pool.pages_for(self._solo.num_branch_slots(request.job)) if num_others else 0
        num_pages = pool.pages_for(request.num_slots) + num_own * num_others
        if num_pages > pool.num_pages:
            raise ContextLengthExceededError(
                f"{request.num_answers} answers need {num_pages} pages; there are {pool.num_pages}",
                param="n",
            )

    def take(self, request: ActiveRequest) -> bool:
        """Pages for the whole of a request, those of further answers kept by them; or none.

        Returns:
            Whether there were enough.
        """
        num_branch_slots = self._solo.num_branch_slots(request.job)
        for holder in (*request.others, request):
            if holder is request:
                self._take_prompt(request)
            else:
                holder.pages = self._pool.allocate(num_branch_slots)
            if holder.pages is None:
                request.release()
                return False
        return True

    def _take_prompt(self, request: ActiveRequest) -> None:
        job, pool = request.job, self._pool
        trunk = self._kept.find(job.plan, job.owner) if job.reuses_prompts else None
        if trunk is None:
            request.pages = pool.allocate(request.num_slots)
            return
        with trunk:
            num_shared = trunk.num_tokens // pool.page_tokens
            num_own = pool.pages_for(request.num_slots) - num_shared
            own = pool.allocate(num_own * pool.page_tokens)
            if own is None:
                return
            try:
                request.pages = pool.branch(trunk, own, trunk.num_tokens, share=True)
            finally:
                if request.pages is None:
                    own.release()
        request.num_ready = trunk.num_tokens
        self._kept.note_hit()
