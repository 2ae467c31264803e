"""The ``chunkcache`` command: everything of the service's, and ``eval``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from chunkcache_api.cli.app import app
from chunkcache_api.cli.app import main as run_app
from chunkcache_eval.auto.cli import register as register_auto
from chunkcache_eval.models.cli import register as register_models
from chunkcache_eval.precache_cli import register as register_precache
from chunkcache_eval.quality.cli import register as register_quality
from chunkcache_eval.retrieval_cli import register as register_retrieval
from chunkcache_eval.service.cli import register as register_service
from chunkcache_eval.store.cli import register as register_store
from chunkcache_eval.trace.cli import register as register_trace

eval_app = typer.Typer(
    no_args_is_help=True, help="Measure: how fast, on this machine, side by side."
)
app.add_typer(eval_app, name="eval")
register_quality(eval_app)
register_auto(eval_app)
register_store(eval_app)
register_models(eval_app)
register_trace(eval_app)
register_retrieval(eval_app)
register_service(eval_app)
register_precache(eval_app)


@eval_app.callback()
def _eval() -> None:
    """Measure on this machine, every ratio side by side in one run."""


@eval_app.command()
def speed(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Question sets (JSONL). Without one, the demo corpus is used."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions per file.")] = 3,
    near_tokens: Annotated[
        int | None, typer.Option(help="Take the questions whose context is nearest to this size.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to time.")] = None,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 3,
    model: Annotated[str | None, typer.Option(help="Model to measure.")] = None,
    preparation: Annotated[str | None, typer.Option(help="Preparation of the chunks.")] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the entries.")] = None,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time fused answers against full prefills of the same prompts.

    Example: chunkcache eval speed --data questions.jsonl --limit 5 --ratio 0.1 --json
    """
    from chunkcache.settings import load_settings
    from chunkcache_eval.datasets.records import demo_questions, read_questions
    from chunkcache_eval.question_choice import QuestionChoice
    from chunkcache_eval.report import print_speed
    from chunkcache_eval.speed import measure_speed

    settings = load_settings(model=model, preparation=preparation, codec=codec)
    report = measure_speed(
        [read_questions(path) for path in data] if data else [demo_questions()],
        QuestionChoice(limit, near_tokens),
        settings=settings,
        policies=[(name, ratio) for name in policy or ["query"]],
        repeats=repeats,
        with_memory=memory,
        progress=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        print_speed(report)


def main() -> None:
    """Entry point of the ``chunkcache`` script."""
    run_app()
