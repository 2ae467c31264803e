"""``chunkcache models``: what a model is fit for, before anything is built on it."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import progress_lines
from chunkcache_api.cli.options import AdapterOption, JsonOption, QuantisationOption
from chunkcache_api.cli.render import gate_table, size

HELP = help_text(
    """Check models before you build on them, and convert those that cannot be loaded as they are.

    No store is opened and none is made.""",
    "chunkcache models check demo",
    "chunkcache models convert ./old-model ./new-model",
)
CHECK_HELP = help_text(
    """Load a model and check that answers over cached chunks can be right.

    Chunks are prefilled alone, moved, and recomputed in full; the result is compared with the plain
    forward of the model's own library, and moved keys with the library's rotation. Ends with 0 if
    chunks can be reused; with 3 if only full prefills are right (the model is then served without
    reuse); with 1 if the model is refused, and says why.""",
    "chunkcache models check demo",
    "chunkcache models check ./my-model --json",
    "chunkcache models check gemma-3-270m-q4_k_m.gguf",
    "chunkcache models check ./my-model --adapter ./my-lora",
    "chunkcache models check demo --quantisation int8",
)

CONVERT_HELP = help_text(
    """Make a directory that can be loaded of a model that cannot.

    SOURCE is a directory with a pickled checkpoint (pytorch_model.bin or its shards), or a .gguf
    file. A pickle is a program: it is read by a reader that builds tensors and refuses everything
    else, here and in no other command. DEST gets safetensors files, the configuration and the
    tokenizer; it appears when it is complete.""",
    "chunkcache models convert ./old-model ./new-model",
    "chunkcache models convert gemma-3-270m-q4_k_m.gguf ./gemma-3-270m",
)

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.command("check", help=CHECK_HELP)
def check(
    model: Annotated[
        str, typer.Argument(help="'demo', a directory, a .gguf file or a hub id.", metavar="MODEL")
    ],
    trust_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--trust-remote-code",
            envvar="CHUNKCACHE_TRUST_REMOTE_CODE",
            help="Run Python code that comes with the model; read it first.",
            show_default="not run",
        ),
    ] = None,
    adapter: AdapterOption = None,
    quantisation: QuantisationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the gate on a model and print what it measured."""
    with reporting_errors(as_json=as_json):
        found = check_model(
            model,
            adapter=adapter,
            quantisation=quantisation,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        print_json(found)
    else:
        results.print(gate_table(found))
    if found["gate"]["full_only"]:
        raise typer.Exit(ExitCode.PARTIAL)


@app.command("convert", help=CONVERT_HELP)
def convert(
    source: Annotated[Path, typer.Argument(help="A directory or a .gguf file.", metavar="SOURCE")],
    dest: Annotated[Path, typer.Argument(help="The new directory.", metavar="DEST")],
    as_json: JsonOption = False,
) -> None:
    """Convert a model's files and say what came of it."""
    with reporting_errors(as_json=as_json):
        from chunkcache.model.conversion import convert_model

        with progress_lines(f"converting {source.name}") as progress:
            done = convert_model(source.expanduser(), dest.expanduser(), progress)
    if as_json:
        print_json(
            {
                "source": str(source),
                "directory": str(done.directory),
                "tensors": done.num_tensors,
                "weight_bytes": done.weight_bytes,
            }
        )
    else:
        say(
            f"{done.num_tensors:,} tensors, {size(done.weight_bytes)}, in {dest}; next: "
            f"chunkcache models check {shlex.quote(str(dest))}"
        )


def check_model(model: str, **settings: Any) -> dict[str, Any]:
    """Load a model, with the settings' device and dtype, run its gate, compare its template.

    Args:
        model: As in the settings.
        **settings: Other fields of ``Settings``; None takes the environment's value or the default.

    Returns:
        ``model``, ``family``, ``serves`` (``reuse`` or ``full``), its geometry, what its weights
        are, ``template`` with the joints where the chat template's own ids differ, and ``gate``
        with every figure.

    Raises:
        ModelError: It cannot be loaded, is not supported, or even its full prefill is not right.
    """
    import msgspec

    from chunkcache.model.gate import check_gate, run_gate
    from chunkcache.model.template_check import check_template
    from chunkcache.model_opening import load_configured_model
    from chunkcache.settings import load_settings

    configured = load_settings(model=model, **settings)
    with progress_lines(f"loading {Path(model).name}") as progress:
        loaded = load_configured_model(configured, progress)
        progress("comparing with the plain forward")
        report = run_gate(loaded.runner)
    check_gate(report)
    template = check_template(loaded.chat, loaded.template, loaded.tokenizer)
    spec = loaded.runner.spec
    return {
        "model": report.model_name,
        "family": spec.family.name,
        "serves": "full" if report.full_only else "reuse",
        "layers": spec.num_layers,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_positions": spec.max_positions,
        "windows": sorted({w for w in spec.windows if w is not None}),
        "rope_depends_on_length": spec.rope.is_length_dependent,
        **loaded.weights_facts(),
        "template": msgspec.to_builtins(template),
        "gate": msgspec.to_builtins(report),
    }
