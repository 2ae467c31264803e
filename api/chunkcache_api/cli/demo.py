"""``chunkcache demo``: the bundled handbook, pre-cached and asked, beside the full prefill."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkcache_api.cli.console import (
    ExitCode,
    fail,
    messages,
    print_json,
    reporting_errors,
    results,
    say,
)
from chunkcache_api.cli.demo_data import DemoQuestion, demo_items, demo_questions
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import (
    AdapterOption,
    JsonOption,
    ModelOption,
    PolicyOption,
    PreparationOption,
    QuantisationOption,
    RatioOption,
    TargetOption,
)
from chunkcache_api.cli.precache_run import run_precache
from chunkcache_api.cli.render import (
    precache_table,
    verification_line,
    verification_table,
    warning_lines,
)
from chunkcache_api.cli.stopping import StopRequest

if TYPE_CHECKING:
    from chunkcache.chunk_cache import ChunkCache
    from chunkcache.results import Answer, PrecacheSummary

HELP = help_text(
    """See it work: a small handbook is pre-cached and asked, beside the full prefill.

    The first run prefills twelve documents; later runs find them in the store and prefill
    nothing.""",
    "chunkcache demo",
    "chunkcache demo --questions 7 --policy none",
    "chunkcache demo --json | jq .speedup_median",
)

ANSWER_TOKENS = 32


def demo(
    num_questions: Annotated[
        int, typer.Option("--questions", "-n", min=1, help="How many questions to ask.")
    ] = 3,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the store.", show_default="demo.store in the cache directory"
        ),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    quantisation: QuantisationOption = None,
    policy: PolicyOption = None,
    ratio: RatioOption = None,
    target: TargetOption = None,
    preparation: PreparationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pre-cache the handbook, ask about it twice over, compare."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import load_settings

        store = store or load_settings().cache_dir.expanduser() / "demo.store"
        with open_cache(
            store=store,
            model=model,
            adapter=adapter,
            quantisation=quantisation,
            policy=policy,
            recompute_ratio=ratio,
            target_kl=target,
            preparation=preparation,
        ) as opened:
            summary = _precache(opened.cache, as_json=as_json)
            say("running one short prompt first, so that no question is charged the warm-up")
            opened.cache.answer("Are you ready?", [], max_tokens=2)
            asked = [
                (question, _ask(opened.cache, question, is_shown=not as_json))
                for question in demo_questions()[:num_questions]
            ]
    if as_json:
        print_json(_body(summary, asked))
        return
    median = statistics.median(_speedup(answer) for _, answer in asked)
    results.print(f"\nMedian speed-up of the first token: {median:.1f} times", style="bold")
    say('next: chunkcache precache YOUR_DOCS/, then chunkcache ask "..." --doc ID')


def _precache(cache: "ChunkCache", *, as_json: bool) -> "PrecacheSummary":
    with StopRequest() as stop:
        summary = run_precache(cache, demo_items(), stop)
    if summary.interrupted:
        fail("interrupted", "interrupted", as_json=as_json, exit_code=ExitCode.INTERRUPTED)
    messages.print(precache_table(summary))
    return summary


def _ask(cache: "ChunkCache", question: DemoQuestion, *, is_shown: bool) -> "Answer":
    with messages.status(question.question):
        answer = cache.answer(
            question.question, question.document_ids, compare=True, max_tokens=ANSWER_TOKENS
        )
    if is_shown:
        results.print()
        results.print(
            f"{question.question} (expected: {question.gold})", style="bold", markup=False
        )
        results.print(verification_table(answer))
        results.print(verification_line(answer), markup=False, soft_wrap=True)
        for line in warning_lines(answer):
            say(line)
    return answer


def _body(summary: "PrecacheSummary", asked: list[tuple[DemoQuestion, "Answer"]]) -> dict[str, Any]:
    first = asked[0][1]
    return {
        "speedup_median": statistics.median(_speedup(answer) for _, answer in asked),
        "prefilled_chunks": summary.prefilled_chunks,
        "model": first.model,
        "policy": first.report.policy,
        "preparation": first.report.preparation,
        "questions": [_question_body(question, answer) for question, answer in asked],
    }


def _question_body(question: DemoQuestion, answer: "Answer") -> dict[str, Any]:
    verification = answer.verification
    assert verification is not None
    return {
        "question": question.question,
        "document_ids": list(question.document_ids),
        "fused_answer": answer.text,
        "full_answer": verification.full_answer,
        "gold": question.gold,
        "fused_ttft_ms": answer.report.timings.ttft_ms,
        "full_ttft_ms": verification.full_ttft_ms,
        "speedup": answer.speedup,
        "tokens_by_source": answer.report.account.by_source(),
        "kl_first": verification.kl_first,
        "mean_kl": verification.mean_kl,
        "agreement": verification.agreement,
        "agree": verification.agreement == 1,
    }


def _speedup(answer: "Answer") -> float:
    assert answer.speedup is not None
    return answer.speedup
