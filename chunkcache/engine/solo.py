"""One request from its plan to its last token, as a generator of steps.

The engine begins its fusions with this, and runs with it what nobody waits for; who has pages of
their own runs requests beside the engine's. Knows no queue and no other requests.
"""

import time
from collections.abc import Generator

from chunkcache.engine.decode import DecodeTile
from chunkcache.engine.request import ActiveRequest, GenerationJob
from chunkcache.engine.rerun import may_rerun, rerun_steps, reruns_at
from chunkcache.engine.stream import AnswerStream, Finished
from chunkcache.errors import ContextLengthExceededError
from chunkcache.fusion.fuse import Fusion, LoadEntry
from chunkcache.fusion.template_entries import LoadTemplate
from chunkcache.model.runner import ModelRunner
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.pages import PagePool
from chunkcache.results import ReuseWarning


class SoloRunner:
    """Runs requests one by one. Only for the thread that owns the model.

    Args:
        runner: The model.
        tokenizer: Turns answers into text.
        pool: Where the pages come from.
        load_entry: Finds or computes entries of chunks.
        load_template: Finds or computes entries of template text.
        tile: Decodes; its number of rows is part of what an answer's bits depend on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: TextTokenizer,
        pool: PagePool,
        load_entry: LoadEntry,
        load_template: LoadTemplate,
        tile: DecodeTile,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._pool = pool
        self._load_entry = load_entry
        self._load_template = load_template
        self._tile = tile

    def begin(self, request: ActiveRequest) -> None:
        """Set a request's fusion up on its pages."""
        assert request.pages is not None
        request.started_at = time.perf_counter()
        if request.repeated is not None:
            request.steps = request.repeat()
            return
        fusion = Fusion(
            self._runner,
            self._pool,
            request.pages,
            request.job.plan,
            self._load_entry,
            self._load_template,
            ready=request.ready,
        )
        request.steps = request.fuse(fusion.steps())

    def num_branch_slots(self, job: GenerationJob) -> int:
        """Slots that each answer but the first needs beside those that it shares."""
        if self._may_begin_again(job):
            return job.plan.layout.num_tokens + job.max_tokens
        return job.max_tokens + self._pool.page_tokens

    def branch(self, request: ActiveRequest) -> list[ActiveRequest]:
        """Have the other answers of a request begin where its fusion ended; returns them all.

        Where it fails, they are the request's as before, to be released with it.
        """
        assert request.pages is not None
        assert request.outcome is not None
        for other in request.others:
            assert other.pages is not None
            other.pages = self._pool.branch(
                request.pages,
                other.pages,
                request.outcome.layout.num_tokens,
                share=not self._may_begin_again(request.job),
            )
            other.outcome, other.started_at = request.outcome, request.started_at
        others, request.others = request.others, []
        return [request, *others]

    def _may_begin_again(self, job: GenerationJob) -> bool:
        return may_rerun(self._runner.spec, job.plan.layout.num_tokens + job.max_tokens)

    def must_begin_again(self, request: ActiveRequest) -> bool:
        """Whether an answer's next token changes the rotation of all that stands before it."""
        return reruns_at(self._runner.spec, request.next_row().position)

    def begin_again(self, request: ActiveRequest) -> None:
        """Have a prompt and its answer so far run anew, as the model's rotation changes."""
        assert request.pages is not None
        request.warnings.append(
            ReuseWarning(
                "rotation_switched",
                f"the answer grew past {self._runner.spec.rope.switch_tokens} tokens, where the "
                "model's rotation changes: everything ran again, nothing is reused from there on",
            )
        )
        request.steps = rerun_steps(self._runner, self._pool, request.pages, request.sequence_ids)

    def steps(self, job: GenerationJob) -> Generator[None, None, Finished]:
        """Run a request; yields where other work may be done, returns its end.

        Closing it early gives everything back.

        Raises:
            ContextLengthExceededError: There are not enough free pages.
            ChunkCacheError: The request failed.
        """
        assert job.num_answers == 1
        stream = AnswerStream(on_cancel=lambda: None)
        request = ActiveRequest(job, stream, self._tokenizer, self._runner.eos_token_ids)
        request.pages = self._pool.allocate(request.num_slots)
        if request.pages is None:
            raise ContextLengthExceededError(f"no pages for {request.num_slots} tokens")
        try:
            self.begin(request)
            assert request.steps is not None
            logits = yield from request.steps
            while (reason := request.take(logits)) is None:
                yield
                if self.must_begin_again(request):
                    self.begin_again(request)
                    logits = yield from request.steps
                else:
                    logits = self._tile.step([request.next_row()])[0]
        finally:
            request.release()
        request.finish(reason)
        return stream.result()
