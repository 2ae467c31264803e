"""Pages for requests that begin: all that each may ever need, kept prompts' pages among them."""

from dataclasses import replace

from chunkcache.engine.kept_pages import KeptPages
from chunkcache.engine.kept_prompts import KeptPrompts, PromptStart
from chunkcache.engine.request import ActiveRequest
from chunkcache.engine.solo import SoloRunner
from chunkcache.errors import ContextLengthExceededError
from chunkcache.fusion.fuse import FusionOutcome
from chunkcache.fusion.plan import FusionPlan
from chunkcache.fusion.reuse import count_repeat
from chunkcache.pages import PagePool
from chunkcache.results import Timings


class PageReserve:
    """Gives requests their pages. :meth:`take` is for the engine's thread alone.

    Args:
        pool: Where the pages are.
        solo: Knows what further answers need.
        kept: Counts requests that begin with kept pages.
        prompts: Knows which those are.
    """

    def __init__(
        self, pool: PagePool, solo: SoloRunner, kept: KeptPages, prompts: KeptPrompts
    ) -> None:
        self._pool = pool
        self._solo = solo
        self._kept = kept
        self._prompts = prompts

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
        start = self._prompts.find(job.plan, job.owner) if job.reuses_prompts else None
        if start is None:
            request.pages = pool.allocate(request.num_slots)
            return
        with start.lease as trunk:
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
        request.ready = start.ready
        request.repeated = None if start.end is None else repeated_outcome(job.plan, start)
        self._kept.note_hit()


def repeated_outcome(plan: FusionPlan, start: PromptStart) -> FusionOutcome:
    """The outcome of a prompt that is repeated: the logits it had, and an account of its own."""
    assert start.end is not None
    logits, first = start.end.logits, start.end.report
    reuse = count_repeat(replace(first.use, layout=plan.layout), start.ready)
    report = replace(
        first,
        requested_policy=str(plan.requested_policy),
        charged_ratio=0.0,
        account=reuse.account,
        use=reuse.use,
        documents=reuse.documents,
        warnings=plan.warnings,
        timings=Timings(),
    )
    return FusionOutcome(
        logits, logits.new_empty(0, len(logits)), plan.parts, plan.layout, report, True
    )
