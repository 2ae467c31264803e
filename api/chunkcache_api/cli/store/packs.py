"""``chunkcache store export`` and ``chunkcache store import``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chunkcache_api.cli.console import (
    ExitCode,
    error_body,
    print_json,
    reporting_errors,
    results,
    say,
)
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import JsonOption, ModelOption, StoreMaxBytesOption, StoreOption
from chunkcache_api.cli.render import facts_table, size
from chunkcache_api.cli.stopping import StopRequest
from chunkcache_api.cli.store.opening import open_store, showing_steps

EXPORT_HELP = help_text(
    """Write documents, chunks and entries as a corpus pack: safetensors files and a manifest.

    A pack spares others the prefill of the same corpus with the same model. It holds the documents'
    texts, and nothing of this store's secret. No model is loaded. PACK is a new directory; it
    appears once it is whole.""",
    "chunkcache store export handbook.pack",
    "chunkcache store export handbook.pack --model-digest 5be1c0ffee42 --json",
    notes="Exit codes: 0 written; 1 no pack was written; 2 wrong usage; 3 written, but documents "
    "that another tokenizer cut, or damaged entries, were left out.",
)
IMPORT_HELP = help_text(
    """Take a corpus pack's documents and entries into a store.

    A pack of another model, tokenizer or format is refused before anything is written. A document
    and its entries come in together; run the command again after an interruption, and it goes on.
    A document replaces one of the same id. Everything in a pack is checked but one thing: whether
    its numbers are what the model computes. Import packs of people whose answers you trust.""",
    "chunkcache store import handbook.pack",
    "chunkcache store import handbook.pack --store team.store --json",
    notes="Exit codes: 0 imported; 1 refused or failed, and why; 2 wrong usage; 130 interrupted.",
)


def export(
    pack: Annotated[
        Path, typer.Argument(help="The new directory; it must not be there.", metavar="PACK")
    ],
    model_digest: Annotated[
        str | None,
        typer.Option(
            "--model-digest",
            metavar="DIGEST",
            help="Whose entries, if the store holds those of several models: a digest, or its "
            "beginning.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a pack of the default tenant's documents."""
    with reporting_errors(as_json=as_json):
        from chunkcache.chunk_cache import DEFAULT_TENANT
        from chunkcache.identity import tenant_namespace
        from chunkcache.upkeep.pack_export import export_pack

        with (
            open_store(store, read_only=True) as env,
            showing_steps("writing the pack") as on_progress,
        ):
            report = export_pack(
                env,
                tenant_namespace(env.secret, DEFAULT_TENANT),
                pack.expanduser(),
                model=model_digest,
                on_progress=on_progress,
            )
    manifest = report.manifest
    if as_json:
        import msgspec

        body = {"pack": str(pack)} | asdict(report)
        print_json(body | {"manifest": msgspec.to_builtins(manifest)})
    else:
        results.print(
            facts_table(
                pack=f"{pack}, {size(report.num_bytes)} in {manifest.shards:,} files",
                documents=f"{manifest.documents:,}",
                entries=f"{manifest.entries:,} of model {manifest.model[:16]}",
            )
        )
    if report.skipped_documents:
        say(f"left out: {report.skipped_documents:,} documents that another tokenizer cut")
    if report.damaged_entries:
        say(f"left out: {report.damaged_entries:,} damaged entries; chunkcache store verify")
    if report.skipped_documents or report.damaged_entries:
        raise typer.Exit(ExitCode.PARTIAL)


def import_(
    pack: Annotated[Path, typer.Argument(help="The pack's directory.", metavar="PACK")],
    store: StoreOption = None,
    model: ModelOption = None,
    store_max_bytes: StoreMaxBytesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import a pack into the default tenant's documents."""
    on_abort = json.dumps(error_body("interrupted", "aborted")) + "\n" if as_json else ""
    with (
        reporting_errors(as_json=as_json),
        open_cache(store=store, model=model, store_max_bytes=store_max_bytes) as opened,
        StopRequest(on_abort) as stop,
        showing_steps("importing the pack") as on_progress,
    ):
        from chunkcache.upkeep.pack_import import import_pack

        cache = opened.cache
        report = import_pack(
            cache.runtime,
            cache.catalog,
            pack.expanduser(),
            on_progress=on_progress,
            should_stop=stop.is_set,
        )
    if as_json:
        print_json(asdict(report))
    else:
        results.print(
            facts_table(
                documents=f"{report.documents:,} ({report.created:,} new, {report.updated:,} "
                f"changed, {report.unchanged:,} unchanged, {report.expired:,} expired)",
                entries=f"{report.entries:,} stored, {report.present_entries:,} were there, "
                f"{report.left_out_entries:,} left out",
            )
        )
    if report.interrupted:
        say("interrupted: run it again to go on")
        raise typer.Exit(ExitCode.INTERRUPTED)
