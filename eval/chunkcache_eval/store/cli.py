"""``chunkcache eval store``."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import (
    ChunkTokensOption,
    JsonOption,
    ModelOption,
    PreparationOption,
)

if TYPE_CHECKING:
    from chunkcache.settings import Settings
    from chunkcache_eval.store.fidelity import FidelityRun

HELP = help_text(
    """Measure the codecs: bytes per token, warm load beside memcpy, and the cost in fidelity.

    Entries are loaded from the store's page cache and placed into pages, each codec in turn. With
    --data, each codec also answers the questions with policy none and with the default policy, and
    its KL from the full prefill is compared with that of codec raw on the same questions.""",
    "chunkcache eval store",
    "chunkcache eval store --codec raw --codec int8 --chunk-tokens 512 --json",
    "chunkcache eval store --data questions.jsonl --limit 10 --out codecs.eval",
    notes="Exit codes: 0 all measured; 1 nothing measured; 2 wrong usage; 3 some lines or "
    "questions were skipped; 130 interrupted.",
)
CODECS = ("raw", "bf16", "int8", "fp8")


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("store", help=HELP)(store)


def store(
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A codec; repeat for more.", show_default=", ".join(CODECS)
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Entries that one measurement loads.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; the medians count.")] = 9,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A question set (JSONL) to measure fidelity on; repeat for more."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions per file.", show_default="all")
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Answer tokens whose distributions are compared.")
    ] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the answers; run again to go on with what it holds.",
            show_default="not kept",
        ),
    ] = None,
    chunk_tokens: ChunkTokensOption = None,
    preparation: PreparationOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure, print tables."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import load_settings
        from chunkcache_api.cli.opening import log_to_stderr
        from chunkcache_eval.store.loads import measure_loads

        log_to_stderr()
        settings = load_settings(model=model, chunk_tokens=chunk_tokens, preparation=preparation)
        codecs = list(dict.fromkeys(codec or CODECS))
        broken: list[str] = []
        loads = measure_loads(settings, codecs, num_chunks=chunks, repeats=repeats, progress=say)
        run = None
        if data:
            with TemporaryDirectory(prefix="chunkcache-eval-") as folder:
                run = _fidelity(
                    data, limit, answer_tokens, codecs, out or Path(folder), settings, broken
                )
    if as_json:
        body = loads.to_dict()
        if run is not None:
            body["fidelity"] = [codec.to_dict() for codec in run.codecs]
            body["skipped"] = [asdict(question) for question in run.skipped]
            body["broken_lines"] = broken
        print_json(body)
    else:
        from chunkcache_eval.store.table import print_fidelity, print_loads

        print_loads(loads)
        if run is not None:
            print_fidelity(run.codecs)
    raise typer.Exit(_exit_code(run, broken))


def _fidelity(
    data: list[Path],
    limit: int | None,
    answer_tokens: int,
    codecs: list[str],
    folder: Path,
    settings: "Settings",
    broken: list[str],
) -> "FidelityRun":
    from chunkcache_eval.quality.measure import AnswerLengths
    from chunkcache_eval.quality.question_set import load_sets
    from chunkcache_eval.store.fidelity import measure_fidelity

    sets = load_sets(data, limit, broken.append)
    for line in broken:
        say(line)
    return measure_fidelity(
        sets,
        codecs,
        folder,
        settings=settings,
        lengths=AnswerLengths(answer_tokens, answer_tokens),
        progress=say,
    )


def _exit_code(run: "FidelityRun | None", broken: list[str]) -> ExitCode:
    if run is None:
        return ExitCode.OK
    if not run.codecs:
        return ExitCode.FAILED
    return ExitCode.PARTIAL if run.skipped or broken else ExitCode.OK
