"""``chunkcache version``."""

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from chunkcache_api.cli.console import print_json
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption

HELP = help_text(
    "Print the version, and those of the libraries that results depend on.",
    "chunkcache version",
    "chunkcache version --json",
)

_PACKAGES = ("chunkcache", "torch", "transformers", "triton", "lmdb")


def print_version(as_json: JsonOption = False) -> None:
    """Print versions, without loading any of the libraries."""
    found = {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    if as_json:
        print_json({"version": found["chunkcache"], "libraries": found})
        return
    others = ", ".join(f"{name} {value}" for name, value in list(found.items())[1:])
    typer.echo(f"chunkcache {found['chunkcache']} ({others})")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
