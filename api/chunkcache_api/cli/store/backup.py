"""``chunkcache store backup``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption, StoreOption
from chunkcache_api.cli.render import facts_table, size
from chunkcache_api.cli.store.opening import open_store, showing_steps

HELP = help_text(
    """Copy a store into a new directory while others go on using it.

    The copy is of one moment, holds no free space, is examined as 'verify' does, and appears under
    its name only once it is whole and on disk. It holds the store's secret: keep it as safe as the
    store. To restore it, open it: --store DEST.""",
    "chunkcache store backup /backups/monday",
    "chunkcache store backup /backups/monday --store team.store --json",
    'chunkcache ask "What is the PIN?" --doc handbook.md --store /backups/monday',
    notes="Exit codes: 0 copied and sound; 1 no copy was made; 2 wrong usage; 3 copied, and "
    "something in it is damaged, as it is in the store.",
)


def backup(
    dest: Annotated[
        Path, typer.Argument(help="The new directory; it must not be there.", metavar="DEST")
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy and examine."""
    with reporting_errors(as_json=as_json):
        from chunkcache.upkeep.backup import backup as copy_store

        with (
            open_store(store, read_only=True) as env,
            showing_steps("copying the store") as on_progress,
        ):
            report = copy_store(env, dest.expanduser(), on_progress=on_progress)
        file_bytes = (dest.expanduser() / "data.mdb").stat().st_size
    body = {
        "backup": str(dest),
        "file_bytes": file_bytes,
        "sound": report.is_sound,
        "damaged": report.num_damaged,
        "checked": asdict(report.checked),
    }
    if as_json:
        print_json(body)
    else:
        results.print(
            facts_table(
                backup=f"{dest}, {size(file_bytes)}",
                documents=f"{report.checked.documents:,} in {report.checked.chunks:,} chunks",
                entries=f"{report.checked.entries:,}",
            )
        )
    if not report.is_sound:
        say("the copy holds what is damaged in the store: chunkcache store verify --repair")
        raise typer.Exit(ExitCode.PARTIAL)
