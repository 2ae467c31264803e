"""``chunkcache eval auto``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import (
    CodecOption,
    JsonOption,
    ModelOption,
    PreparationOption,
    StoreOption,
)

if TYPE_CHECKING:
    from chunkcache.settings import Settings
    from chunkcache_eval.auto.run import AutoRun

HELP = help_text(
    """Calibrate the policy auto for a model, and check on held-back questions that it keeps its
    promise.

    Every question is answered at a few ratios and compared with its full prefill. On one half of
    them the policy learns how far off an answer is, given what it sees; the other half says how
    many answers meet their target, and what the fixed ratio costs that comes as close. With --keep the
    result goes into the store: auto then works there, for this model, preparation and codec. The
    demo model's is shipped.

    Take questions like those that will be asked: a calibration holds for such as these. Run the
    command again to go on with one that was stopped.""",
    "chunkcache eval auto --data questions.jsonl --keep",
    "chunkcache eval auto --data questions.jsonl --target 0.02 --json",
    notes="Exit codes: 0 done; 1 failed; 2 wrong usage; 3 some questions were skipped; "
    "130 interrupted.",
)


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("auto", help=HELP)(auto)


def auto(
    data: Annotated[list[Path], typer.Option(help="A question set (JSONL); repeat for more.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions per file.", show_default="all")
    ] = None,
    max_context_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave longer prompts out.", show_default="none")
    ] = None,
    target: Annotated[
        list[float] | None,
        typer.Option(
            metavar="KL",
            help="A target to check, in nats of mean KL divergence; repeat for more.",
            show_default="0.005 to 0.1",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the calibration in the store.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of what was measured; made if missing.")] = Path(
        "chunkcache.auto"
    ),
    store: StoreOption = None,
    model: ModelOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    as_json: JsonOption = False,
) -> None:
    """Calibrate, check, print a table."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import load_settings
        from chunkcache_api.cli.opening import log_to_stderr

        log_to_stderr()
        settings = load_settings(store=store, model=model, preparation=preparation, codec=codec)
        run = _run(data, limit, max_context_tokens, target, out, settings)
        if keep:
            _keep(run, settings)
    if as_json:
        import msgspec

        print_json(
            {
                "checks": [asdict(c) for c in run.checks],
                "fixed": [asdict(f) for f in run.fixed],
                "table": msgspec.to_builtins(run.table),
                "skipped": list(run.skipped),
                "kept": keep,
            }
        )
    else:
        from chunkcache_eval.auto.table import print_run

        print_run(run)
    raise typer.Exit(ExitCode.PARTIAL if run.skipped else ExitCode.OK)


def _run(
    data: list[Path],
    limit: int | None,
    max_context_tokens: int | None,
    targets: list[float] | None,
    out: Path,
    settings: "Settings",
) -> "AutoRun":
    """Everything that can be refused is refused before a model is loaded."""
    from chunkcache.fusion.policies.auto import Auto
    from chunkcache_eval.auto.run import TARGETS, calibrate_auto
    from chunkcache_eval.quality.question_set import load_sets

    wanted = tuple(Auto(t).target_kl for t in targets or TARGETS)
    sets = load_sets(data, limit, say)
    return calibrate_auto(
        sets,
        out,
        wanted,
        settings=settings,
        max_context_tokens=max_context_tokens,
        progress=say,
    )


def _keep(run: "AutoRun", settings: "Settings") -> None:
    from pathlib import Path

    from chunkcache.auto_calibration import keep_auto_table
    from chunkcache.store.environment import StoreEnvironment

    folder = Path(settings.store).expanduser()
    with StoreEnvironment.open(folder, max_bytes=settings.store_max_bytes) as env:
        keep_auto_table(env, run.table)
    say(f"kept in {folder}")
