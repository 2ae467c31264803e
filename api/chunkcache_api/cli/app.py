"""The ``chunkcache`` command: its commands, and nothing of what they do."""

import io
import sys

import typer

from chunkcache_api.cli import (
    ask,
    config,
    demo,
    doctor,
    keys,
    mcp,
    models,
    plan,
    precache,
    serve,
    stats,
    version,
)
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.store import app as store

HELP = help_text(
    """Answers over your documents from keys and values that were computed once.

    Settings without an option come from environment variables named CHUNKCACHE_*, for example
    CHUNKCACHE_DEVICE=cuda, or from the TOML file that CHUNKCACHE_CONFIG names; chunkcache config
    show lists them. Every command takes --json: it then prints one JSON object on stdout.
    Progress and errors go to stderr.""",
    "chunkcache demo",
    "chunkcache precache docs/",
    'chunkcache ask "What is the PIN?" --doc handbook.md',
    "chunkcache serve",
)

app = typer.Typer(
    name="chunkcache",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("demo", help=demo.HELP)(demo.demo)
app.command("precache", help=precache.HELP)(precache.precache)
app.command("ask", help=ask.HELP)(ask.ask)
app.command("serve", help=serve.HELP)(serve.serve)
app.command("mcp", help=mcp.HELP)(mcp.mcp)
app.add_typer(keys.app, name="keys")
app.command("stats", help=stats.HELP)(stats.stats)
app.command("plan", help=plan.HELP)(plan.plan)
app.add_typer(store.app, name="store")
app.add_typer(models.app, name="models")
app.command("doctor", help=doctor.HELP)(doctor.doctor)
app.add_typer(config.app, name="config")
app.command("version", help=version.HELP)(version.print_version)


def main() -> None:
    """Run the command line."""
    # An answer may hold what a narrow stdout cannot show; it should not end the command.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
