"""A fused answer beside the full prefill's answer to the same prompt.

What has to be run is told as a coroutine that asks for one engine job after the other, so that
whoever drives it decides how they run: at once, when the engine is idle, or on pages of its own.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final

from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.engine.stream import Finished
from chunkcache.fusion.fidelity import kl_divergence, leading_agreement, mean_kl, num_agreeing
from chunkcache.results import Verification

COMPARED_TOKENS: Final = 8
"""Leading tokens of the full prefill's answer over which distributions are compared."""

VerificationJobs = Generator[GenerationJob, Finished, Verification]
"""Asks for jobs, is sent how they ended, returns what that says."""
RunJob = Callable[[GenerationJob], Generator[None, None, Finished]]
"""Runs a job in steps."""


def verification_jobs(job: GenerationJob, fused: Finished) -> VerificationJobs:
    """What must run to verify an answer: the full prefill, then its answer under the fusion.

    The full prefill's answer is drawn as the fused one was, with the same seed. Distributions are
    compared behind the prompt and behind the leading tokens of that answer, which ride along in a
    fusion of the very rows.

    Args:
        job: What was asked.
        fused: Its answer.
    """
    plan = job.plan.over(fused.parts)
    full = yield replace(
        job.alone(), plan=plan.in_full(), num_kept_logits=COMPARED_TOKENS, reuses_prompts=False
    )
    reference = full.step_logits
    assert reference is not None
    # Where the end token is among the compared steps, there is one step more than tokens.
    answer_ids = full.token_ids[: len(reference) - 1]
    scored = yield GenerationJob(
        plan.scoring(answer_ids), SamplingParams(), 1, owner=job.owner, reuses_prompts=False
    )
    return Verification(
        kl_first=kl_divergence(full.first_logits, fused.first_logits),
        mean_kl=mean_kl(reference, scored.scored_logits),
        agreement=leading_agreement(full.token_ids, fused.token_ids),
        agreeing_tokens=num_agreeing(full.token_ids, fused.token_ids),
        full_answer=full.text,
        full_token_ids=full.token_ids,
        full_ttft_ms=full.report.timings.ttft_ms,
    )


def verification_steps(
    job: GenerationJob, fused: Finished, run: RunJob
) -> Generator[None, None, Verification]:
    """Verify an answer step by step.

    Args:
        job: What was asked.
        fused: Its answer.
        run: Runs what has to be run.
    """
    jobs = verification_jobs(job, fused)
    wanted = next(jobs)
    while True:
        finished = yield from run(wanted)
        try:
            wanted = jobs.send(finished)
        except StopIteration as stop:
            return stop.value
