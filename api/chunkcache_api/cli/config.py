"""``chunkcache config``: the settings in force, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from chunkcache_api.cli.console import print_json, printable, reporting_errors, results
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import (
    ChunkTokensOption,
    CodecOption,
    HostTierBytesOption,
    JsonOption,
    KeysFileOption,
    ModelOption,
    PolicyOption,
    PreparationOption,
    RatioOption,
    RemoteOption,
    StoreMaxBytesOption,
    StoreOption,
    SystemOption,
    TargetOption,
)

if TYPE_CHECKING:
    from chunkcache.settings_sources import SettingInfo

HELP = help_text(
    """Show the settings in force.

    A value comes from an option, else from an environment variable CHUNKCACHE_*, else from the TOML
    file that CHUNKCACHE_CONFIG names, else it is the default.""",
    "chunkcache config show --explain",
)
SHOW_HELP = help_text(
    """Print every setting in force, and where its value comes from.

    Options are those of chunkcache serve: put in front of you what a command would run with.""",
    "chunkcache config show",
    "chunkcache config show --explain",
    "chunkcache config show --store team.store --json",
)

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def config() -> None:
    """Only ``show`` today; without this the group would be that command itself."""


@app.command("show", help=SHOW_HELP)
def show(
    context: typer.Context,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each setting does.")] = False,
    store: StoreOption = None,
    model: ModelOption = None,
    policy: PolicyOption = None,
    recompute_ratio: RatioOption = None,
    target_kl: TargetOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    chunk_tokens: ChunkTokensOption = None,
    host_tier_bytes: HostTierBytesOption = None,
    store_max_bytes: StoreMaxBytesOption = None,
    remote: RemoteOption = None,
    system: SystemOption = None,
    keys_file: KeysFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the settings."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import Settings
        from chunkcache.settings_sources import explain_settings

        typed = {
            name: value
            for name, value in context.params.items()
            if name in Settings.model_fields and _is_typed(context, name)
        }
        found = explain_settings(typed)
    if as_json:
        print_json({"settings": [_body(setting) for setting in found]})
    else:
        results.print(_table(found, with_meaning=explain))


def _is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line; options read the environment too."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _body(setting: "SettingInfo") -> dict[str, Any]:
    return {
        "name": setting.name,
        "value": _plain(setting.value),
        "source": setting.source,
        "default": _plain(setting.default),
        "meaning": setting.meaning,
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _table(found: "tuple[SettingInfo, ...]", *, with_meaning: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("source", no_wrap=True)
    if with_meaning:
        table.add_column("meaning", overflow="fold", ratio=1)
    for setting in found:
        value = "" if setting.value is None else printable(str(setting.value))
        meaning = [Text(setting.meaning)] if with_meaning else []
        table.add_row(setting.name, Text(value), setting.source, *meaning)
    return table
