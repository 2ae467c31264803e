"""``chunkcache store gc``."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkcache_api.cli.console import print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption, StoreOption
from chunkcache_api.cli.render import facts_table, size
from chunkcache_api.cli.store.opening import open_store, showing_steps

if TYPE_CHECKING:
    from chunkcache.upkeep.collect import CollectReport

HELP = help_text(
    """Remove what nothing needs: expired documents, and what no document holds.

    Documents that have expired go with everything prepared for them or behind them. The entries of
    a model that is no longer served go only if its digest is given; the list of models shows every
    digest. Freed space is used again before the file grows; 'chunkcache store backup' writes a
    copy without it.""",
    "chunkcache store gc --dry-run",
    "chunkcache store gc --store team.store",
    "chunkcache store gc --drop-model 5be1c0ffee42 --json",
    notes="Exit codes: 0 done; 1 nothing was removed, and why; 2 wrong usage.",
)


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    drop_models: Annotated[
        list[str] | None,
        typer.Option(
            "--drop-model",
            metavar="DIGEST",
            help="Also remove the entries of this model: its digest, or the first 8 or more "
            "characters; repeat for more.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect, and say what went."""
    with reporting_errors(as_json=as_json):
        from chunkcache.upkeep.collect import collect

        with (
            open_store(store, read_only=False) as env,
            showing_steps("looking for what nothing needs"),
        ):
            report = collect(env, drop_models=drop_models or (), dry_run=dry_run)
    if as_json:
        print_json(_report_dict(report))
        return
    would = "would go" if dry_run else "removed"
    results.print(
        facts_table(
            expired=f"{report.expired_documents:,} documents {would}",
            unused=f"{report.chunks:,} chunks, {report.entries:,} entries, {report.vectors:,} "
            f"embeddings, {report.quarantined:,} remains of damaged entries {would}",
            space=f"{size(report.freed_bytes)} given back; {size(report.live_bytes)} in use, "
            f"file {size(report.file_bytes)}",
        )
    )
    for model in report.models:
        fate = f", {would}" if model.dropped else ""
        say(f"model {model.model}: {model.entries:,} entries, {size(model.num_bytes)}{fate}")


def _report_dict(report: "CollectReport") -> dict[str, Any]:
    body = asdict(report)
    del body["entry_keys"]
    return body
