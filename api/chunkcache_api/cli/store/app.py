"""The ``chunkcache store`` group: its commands, and nothing of what they do."""

import typer

from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.store import backup, gc, packs, verify

HELP = help_text(
    """Look after a store: check and mend it, clean it up, copy it.

    A server may go on over the same store meanwhile.""",
    "chunkcache store verify",
    "chunkcache store gc --dry-run",
    "chunkcache store backup /backups/monday",
    "chunkcache store export handbook.pack",
)

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("verify", help=verify.HELP)(verify.verify)
app.command("gc", help=gc.HELP)(gc.gc)
app.command("backup", help=backup.HELP)(backup.backup)
app.command("export", help=packs.EXPORT_HELP)(packs.export)
app.command("import", help=packs.IMPORT_HELP)(packs.import_)
