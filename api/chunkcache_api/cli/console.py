"""Where output goes and how a command ends: stdout for results, stderr for everything else.

Knows nothing of models or stores. With ``--json`` a command prints one object on stdout, an error
included; a script needs neither stderr nor patterns.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

import typer
from rich.console import Console

results = Console(highlight=False)
"""Stdout."""
messages = Console(stderr=True, highlight=False)
"""Stderr: progress, status, tables beside an answer, errors."""


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    INTERRUPTED = 130


def say(line: str) -> None:
    """Print one line on stderr, as it is."""
    messages.print(printable(line), markup=False, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """Print a command's one JSON object. ASCII, so that any stdout takes it."""
    typer.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def printable(text: str) -> str:
    """Text whose control characters a terminal would obey, shown as escapes instead.

    Names of files and answers come from whoever wrote the documents.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def error_body(code: str, message: str) -> dict[str, Any]:
    """The JSON form of a failure."""
    return {"error": {"code": code, "message": message}}


def fail(
    message: str, code: str, *, as_json: bool, exit_code: ExitCode = ExitCode.FAILED
) -> NoReturn:
    """Report why a command ends, and end it."""
    say(f"error: {message} ({code})")
    if as_json:
        print_json(error_body(code, message))
    raise typer.Exit(exit_code)


@contextmanager
def reporting_errors(*, as_json: bool) -> Iterator[None]:
    """Turn errors that a caller can cause into a line and an exit code; ours keep a traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        fail("interrupted", "interrupted", as_json=as_json, exit_code=ExitCode.INTERRUPTED)
    except Exception as error:
        from chunkcache.errors import ChunkCacheError

        if not isinstance(error, ChunkCacheError):
            raise
        fail(error.message, error.code, as_json=as_json)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _finite(value: Any) -> Any:
    """The value with null for what JSON cannot say: infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
