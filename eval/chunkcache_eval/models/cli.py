"""``chunkcache eval models``."""

from typing import Annotated

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption

HELP = help_text(
    """Measure whether models are right: against the library's own forward over the same token ids.

    Every family with every rotation it can have, as a tiny random model: logits of a prompt fused
    in full, layer-0 keys of a chunk at near and far offsets, and half precision beside the
    library's own. Real models: greedy answers of full prefills, and what int8 weights cost and
    gain. And how long it takes to know which weights a model has.""",
    "chunkcache eval models",
    "chunkcache eval models --model demo --model ./my-model --no-matrix",
    "chunkcache eval models --family gemma2 --family phi3 --json",
    notes="Exit codes: 0 all within its limit; 1 a model cannot be measured; 2 wrong usage; "
    "3 something is over its limit.",
)


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("models", help=HELP)(models)


def models(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A real model: 'demo', a directory, a .gguf file or a hub id; repeat for more.",
            show_default="none",
        ),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Only this family; repeat for more.", show_default="all"),
    ] = None,
    rope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this rotation; repeat for more.", show_default="all"
        ),
    ] = None,
    matrix: Annotated[bool, typer.Option(help="Measure families and rotations.")] = True,
    int8: Annotated[
        bool, typer.Option(help="Measure real models with int8 weights too, on the CPU.")
    ] = True,
    prompts: Annotated[int, typer.Option(min=1, max=20, help="Prompts per real model.")] = 20,
    digest_mb: Annotated[
        int, typer.Option(min=0, help="Size of the file to digest, in MB; 0 for none.")
    ] = 500,
    as_json: JsonOption = False,
) -> None:
    """Measure and print."""
    with reporting_errors(as_json=as_json):
        from chunkcache.errors import InvalidValueError
        from chunkcache.testing import TINY_FAMILIES
        from chunkcache_eval.models.cells import ROPES
        from chunkcache_eval.models.run import ModelsRequest, measure_models
        from chunkcache_eval.models.table import print_models

        for names, known, param in (
            (family, TINY_FAMILIES, "family"),
            (rope, tuple(ROPES), "rope"),
        ):
            unknown = sorted(set(names or ()) - set(known))
            if unknown:
                raise InvalidValueError(
                    f"unknown {param} {', '.join(unknown)}; known: {', '.join(known)}", param=param
                )
        report = measure_models(
            ModelsRequest(
                families=tuple(family or ()),
                ropes=tuple(rope or ()),
                models=tuple(model or ()),
                num_prompts=prompts,
                digest_mb=digest_mb,
                with_matrix=matrix,
                with_int8=int8,
            ),
            say,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        print_models(report)
    if report.failures:
        raise typer.Exit(ExitCode.PARTIAL)
