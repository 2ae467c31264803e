"""``chunkcache store verify``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption, StoreOption
from chunkcache_api.cli.render import facts_table, size
from chunkcache_api.cli.store.opening import open_store, showing_steps

if TYPE_CHECKING:
    from chunkcache.upkeep.verify import VerifyReport

HELP = help_text(
    """Check everything in a store, and mend it with --repair.

    Reads every byte, compares all checksums, and follows all references between documents, chunks,
    entries, neighbours and embeddings in both directions. No model is loaded; others may use the
    store meanwhile, and with --repair writers wait.

    --repair restores a document whose record is damaged from its text, or drops it and says which
    it was; a damaged entry is put aside and computed again when it is asked for; what nothing
    refers to is removed. Nothing else is lost.""",
    "chunkcache store verify",
    "chunkcache store verify --store team.store --repair",
    "chunkcache store verify --json | jq .findings",
    notes="Exit codes: 0 sound, or all mended; 1 could not be examined; 2 wrong usage; 3 something "
    "is damaged. What merely lies there in vain ('damage' false) is listed and is no damage.",
)
MAX_FINDINGS_SHOWN = 50


def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Mend what is found.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Examine a store, say what is wrong, and end with a code that says whether anything is."""
    with reporting_errors(as_json=as_json):
        from chunkcache.upkeep.verify import verify as examine

        with (
            open_store(store, read_only=not repair) as env,
            showing_steps("examining the store") as on_progress,
        ):
            report = examine(env, repair=repair, on_progress=on_progress)
    if as_json:
        print_json(report_dict(report))
    else:
        _explain(report)
    if not report.is_sound:
        raise typer.Exit(ExitCode.PARTIAL)


def report_dict(report: "VerifyReport") -> dict[str, Any]:
    """A report as JSON."""
    from dataclasses import asdict

    return {
        "sound": report.is_sound,
        "repaired": report.is_repaired,
        "damaged": report.num_damaged,
        "checked": asdict(report.checked),
        "findings": [finding.to_dict() for finding in report.findings],
    }


def _explain(report: "VerifyReport") -> None:
    checked, num_waste = report.checked, len(report.findings) - report.num_damaged
    for finding in report.findings[:MAX_FINDINGS_SHOWN]:
        say(f"{finding.fault.value}: {finding.what}: {finding.detail}")
    num_more = len(report.findings) - MAX_FINDINGS_SHOWN
    if num_more > 0:
        say(f"... and {num_more:,} more; --json lists them all")
    results.print(
        facts_table(
            documents=f"{checked.documents:,} in {checked.chunks:,} chunks",
            entries=f"{checked.entries:,}, {size(checked.entry_bytes)} read",
            embeddings=f"{checked.vectors:,}",
            damaged=f"{report.num_damaged:,}{' (mended)' if report.is_repaired else ''}",
            unused=f"{num_waste:,}{' (removed)' if report.is_repaired else ''}",
        )
    )
    if not report.is_sound:
        say("the store is damaged; --repair mends it")
    elif report.num_damaged:
        say("the store was damaged and is sound now")
    else:
        say("the store is sound")
