"""``chunkcache doctor``."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from chunkcache_api.cli.console import (
    ExitCode,
    print_json,
    printable,
    reporting_errors,
    results,
    say,
)
from chunkcache_api.cli.diagnosis import (
    Diagnosis,
    When,
    diagnose,
    diagnose_closed_store,
    diagnose_fidelity,
    start_diagnosis,
)
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache, progress_lines
from chunkcache_api.cli.options import (
    AdapterOption,
    ChunkTokensOption,
    CodecOption,
    JsonOption,
    ModelOption,
    PolicyOption,
    PreparationOption,
    QuantisationOption,
    RatioOption,
    RemoteOption,
    StoreOption,
    TargetOption,
)
from chunkcache_api.cli.render import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chunkcache.settings import Settings

HELP = help_text(
    """Check machine, store and model, and measure how close this model's answers are.

    Fidelity is measured once per model and settings, on five built-in questions: fused answers
    beside full prefills. The figures are kept in the store, which is made if it is not there; no
    document is written. A server over the same store shows them in /v1/models.

    Exit code 0 when all is well, 1 when something should be seen to; it says what.""",
    "chunkcache doctor",
    "chunkcache doctor --fidelity again --policy query --ratio 0.2",
    "chunkcache doctor --fidelity skip --json | jq .problems",
)


def doctor(
    fidelity: Annotated[
        When,
        typer.Option(
            help="Measure how close answers are: 'auto' unless it was measured before, 'again' in "
            "any case, or 'skip' it."
        ),
    ] = "auto",
    store: StoreOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    quantisation: QuantisationOption = None,
    policy: PolicyOption = None,
    ratio: RatioOption = None,
    target: TargetOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    chunk_tokens: ChunkTokensOption = None,
    remote: RemoteOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look, tell, and end with a code that says whether all is well."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import load_settings

        settings = load_settings(
            store=store,
            model=model,
            adapter=adapter,
            quantisation=quantisation,
            policy=policy,
            recompute_ratio=ratio,
            target_kl=target,
            preparation=preparation,
            codec=codec,
            chunk_tokens=chunk_tokens,
            remote=remote,
        )
        found = _examined(settings, fidelity)
    if as_json:
        print_json(found.to_dict())
    else:
        results.print(_table(found))
    for problem in found.problems:
        say(f"problem: {problem.message} ({problem.code})")
    if found.problems:
        raise typer.Exit(ExitCode.FAILED)
    if not as_json:
        say("all is well")


def _examined(settings: "Settings", fidelity: When) -> Diagnosis:
    from chunkcache.errors import ChunkCacheError

    found = start_diagnosis(settings)
    try:
        with open_cache(**dict(settings)) as opened:
            runtime = opened.cache.runtime
            diagnose(found, runtime)
            with progress_lines("measuring fidelity") as show:
                diagnose_fidelity(found, runtime, fidelity, show)
    except ChunkCacheError as error:
        found.note(error.code, error.message)
        diagnose_closed_store(found, settings)
    return found


def _table(found: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(found):
        table.add_row(name, Text(printable(text)))
    return table


def _rows(found: Diagnosis) -> "Iterator[tuple[str, str]]":
    machine = found.machine
    accelerator = f", {machine['accelerator']}" if machine["accelerator"] else ""
    yield (
        "machine",
        f"{machine['cores']} cores, {size(machine['ram_bytes'])} of memory "
        f"({size(machine['ram_available_bytes'])} available){accelerator}",
    )
    yield (
        "versions",
        f"chunkcache {machine['chunkcache']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, python {machine['python']}",
    )
    yield from _store_rows(found)
    if found.remote is not None:
        answer = "answers" if found.remote["reachable"] else "does not answer"
        yield "remote", f"{found.remote['address']} {answer}"
        yield (
            "",
            f"{found.remote['to_send']:,} entries to be sent, {found.remote['to_remove']:,} removals "
            "not confirmed yet",
        )
    yield from _model_rows(found)
    yield from _speed_rows(found)
    yield from _fidelity_rows(found)
    changed = [f"{name} = {s['value']}" for name, s in found.settings.items()]
    yield "settings", "\n".join(changed) if changed else "all at their defaults"


def _store_rows(found: Diagnosis) -> "Iterator[tuple[str, str]]":
    store = found.store
    if store is None:
        yield "store", "not examined"
        return
    yield "store", store["path"]
    yield (
        "",
        f"{store['documents']:,} documents, {store['entries']:,} entries in "
        f"{size(store['entry_bytes'])}, room for {size(store['room_bytes'])} more",
    )
    if store["quarantined"]:
        yield "", f"{store['quarantined']:,} damaged entries were taken out and are computed anew"


def _model_rows(found: Diagnosis) -> "Iterator[tuple[str, str]]":
    model = found.model
    if model is None:
        yield "model", "not examined"
        return
    yield (
        "model",
        f"{model['name']} ({model['family']}, {model['num_layers']} layers, "
        f"{model['max_positions']:,} positions) in {model['dtype']} on {model['device']}",
    )
    yield (
        "",
        f"digest {model['digest'][:16]}; an entry takes {size(model['entry_bytes_per_token'])} "
        "per token",
    )
    gate = model["gate"]
    outcome = "full prefills alone are right" if gate["full_only"] else "passed"
    yield (
        "gate",
        f"{outcome}: logits differ by {gate['logits_difference']:.1e}, layer 0 by "
        f"{gate['layer0_difference']:.1e}, rotation by {gate['rotation_difference']:.1e}, allowed "
        f"{gate['tolerance']:.1e}",
    )


def _speed_rows(found: Diagnosis) -> "Iterator[tuple[str, str]]":
    speed = found.speed
    if speed is None:
        return
    yield (
        "speed",
        f"prefills {speed['prefill_tokens_per_s']:,.0f} tokens/s, loads "
        f"{speed['load_tokens_per_s']:,.0f} tokens/s ({size(int(speed['load_bytes_per_s']))}/s)",
    )


def _fidelity_rows(found: Diagnosis) -> "Iterator[tuple[str, str]]":
    fidelity = found.fidelity
    if fidelity is None:
        yield "fidelity", "not measured"
        return
    yield "fidelity", fidelity["verdict"]
    yield (
        "",
        f"mean KL {fidelity['mean_kl']:.4f} nats (worst question {fidelity['worst_kl']:.4f}) over "
        f"the first {fidelity['compared_tokens']} tokens, agreement {fidelity['agreement']:.0%}; "
        f"charged ratio {fidelity['charged_ratio']:.2f}",
    )
    yield (
        "",
        f"measured {fidelity['measured']} on {fidelity['num_questions']} questions over "
        f"{fidelity['num_context_tokens']:,} tokens: {fidelity['policy']} over "
        f"{fidelity['preparation']}, {fidelity['codec']}",
    )
