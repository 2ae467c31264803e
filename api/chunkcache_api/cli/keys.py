"""``chunkcache keys``: API keys, made, listed and revoked in their file."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from chunkcache_api.cli.console import print_json, printable, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption, KeysFileOption, StoreOption

if TYPE_CHECKING:
    from chunkcache_api.auth.api_key import ApiKey, Scope

HELP = help_text(
    """Make and revoke the API keys of the service.

    Once there is a key, every request needs one. A running server takes changes up at once.""",
    "chunkcache keys create --tenant acme --scope query --scope ingest",
)
CREATE_HELP = help_text(
    """Make a key and print it, this once: only its hash is kept.

    A key opens the data of its tenant and of no other. Scope query asks questions and reads
    documents, ingest stores and deletes documents, admin looks after the server; none holds another.
    What was pre-cached on the command line belongs to the tenant 'default'.""",
    "chunkcache keys create --tenant acme --scope query",
    "chunkcache keys create --tenant acme --scope ingest --days 90 --json",
)
LIST_HELP = help_text(
    "List the keys: ids, tenants, scopes, expiry. The keys themselves are not kept anywhere.",
    "chunkcache keys list",
    "chunkcache keys list --json",
)
REVOKE_HELP = help_text(
    """Revoke a key by its id, which 'chunkcache keys list' shows.

    A running server refuses it from its next request on; what is being answered is finished.""",
    "chunkcache keys revoke 2f1c9a0b4d6e8f70",
)
SECONDS_PER_DAY = 86_400

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.command("create", help=CREATE_HELP)
def create(
    tenant: Annotated[str, typer.Option(help="Whose data the key opens.", metavar="NAME")],
    scope: Annotated[list[str], typer.Option(help="query, ingest or admin; may be repeated.")],
    name: Annotated[str | None, typer.Option(help="What you call the key.")] = None,
    days: Annotated[
        float | None, typer.Option(help="Days that it is accepted.", show_default="for ever")
    ] = None,
    keys_file: KeysFileOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key, keep its hash, print it."""
    with reporting_errors(as_json=as_json):
        from chunkcache_api.auth.api_key import make_key
        from chunkcache_api.auth.keys_file import change_keys

        path = _path(keys_file, store)
        lifetime_seconds = None if days is None else days * SECONDS_PER_DAY
        text, key = make_key(tenant, _scopes(scope), name=name, lifetime_seconds=lifetime_seconds)
        change_keys(path, lambda keys: keys.update({key.key_id: key}))
    if as_json:
        print_json({"key": text, **_body(key), "keys_file": str(path)})
        return
    # Never wrapped: it is to be copied as a whole.
    typer.echo(text)
    say(f"keep it: it is shown this once; {path} holds its hash alone")


@app.command("list", help=LIST_HELP)
def list_keys(
    keys_file: KeysFileOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Print what is kept of every key."""
    with reporting_errors(as_json=as_json):
        from chunkcache_api.auth.keys_file import read_keys

        path = _path(keys_file, store)
        keys = list(read_keys(path).values()) if path.exists() else []
    if as_json:
        print_json({"keys_file": str(path), "keys": [_body(key) for key in keys]})
    elif keys:
        results.print(_table(keys))
    else:
        say(f"there are no keys in {path}")


@app.command("revoke", help=REVOKE_HELP)
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id.", metavar="ID")],
    keys_file: KeysFileOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a key out of the file."""
    with reporting_errors(as_json=as_json):
        from chunkcache.errors import InvalidValueError
        from chunkcache_api.auth.keys_file import change_keys, read_keys

        path = _path(keys_file, store)

        def remove(keys: "dict[str, ApiKey]") -> None:
            if keys.pop(key_id, None) is None:
                raise InvalidValueError(f"there is no key {key_id!r}", param="id")

        read_keys(path)  # so that revoking makes no file
        change_keys(path, remove)
    if as_json:
        print_json({"id": key_id, "revoked": True})
    else:
        results.print(f"revoked {key_id}", markup=False)


def _path(keys_file: Path | None, store: Path | None) -> Path:
    from chunkcache.settings import load_settings
    from chunkcache_api.auth.keys_file import keys_path

    return keys_path(load_settings(keys_file=keys_file, store=store))


def _scopes(names: list[str]) -> "frozenset[Scope]":
    from chunkcache.errors import InvalidValueError
    from chunkcache_api.auth.api_key import SCOPES

    unknown = sorted(set(names).difference(SCOPES))
    if unknown:
        raise InvalidValueError(
            f"there is no scope {unknown[0]!r}; there are {', '.join(SCOPES)}", param="scope"
        )
    return frozenset(scope for scope in SCOPES if scope in names)


def _body(key: "ApiKey") -> dict[str, Any]:
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "name": key.name,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
    }


def _table(keys: "list[ApiKey]") -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("id", "tenant", "scopes", "name", "made", "expires"):
        table.add_column(title, overflow="fold")
    for key in keys:
        table.add_row(
            key.key_id,
            Text(printable(key.tenant)),
            ", ".join(sorted(key.scopes)),
            Text(printable(key.name or "")),
            _day(key.created_at),
            "never" if key.expires_at is None else _day(key.expires_at),
        )
    return table


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
