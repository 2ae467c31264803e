"""Traces line by line, in a folder tied to what they were measured with. Knows nothing of models."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from chunkcache.errors import InvalidValueError
from chunkcache_eval.auto.trace import Trace

TraceKey = tuple[str, str, str]
"""Data set, question, and digest of its texts."""


class TraceLog:
    """Traces in ``traces.jsonl``, what they depend on in ``traces.json``.

    Args:
        folder: Made if it is not there.
        depends_on: Names and values that all its traces share.

    Raises:
        InvalidValueError: The folder cannot be used, holds a line that is no trace, or traces of
            something else.
    """

    def __init__(self, folder: Path, depends_on: Mapping[str, str]) -> None:
        self._path = folder / "traces.jsonl"
        self._traces: dict[TraceKey, Trace] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _bind(folder / "traces.json", depends_on)
            self._read()
        except OSError as error:
            raise InvalidValueError(
                f"{folder} cannot be used: {error.strerror}", param="out"
            ) from error

    def get(self, data: str, question_id: str, text_digest: str) -> Trace | None:
        """What was measured of a question, if it was."""
        return self._traces.get((data, question_id, text_digest))

    def append(self, trace: Trace) -> None:
        """Keep one more."""
        self._traces[_key(trace)] = trace
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(trace) + b"\n")

    def _read(self) -> None:
        """Read what is there; a last line that was torn by a kill is cut off."""
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                trace = msgspec.json.decode(line, type=Trace)
            except msgspec.DecodeError as error:
                raise InvalidValueError(
                    f"{self._path}:{number} is not a trace: {error}", param="out"
                ) from error
            self._traces[_key(trace)] = trace


def _key(trace: Trace) -> TraceKey:
    return trace.data, trace.question_id, trace.text_digest


def _bind(path: Path, depends_on: Mapping[str, str]) -> None:
    if path.exists():
        known = path.read_text(encoding="utf-8")
        if known != _note(depends_on):
            raise InvalidValueError(
                f"{path.parent} holds traces of another model or of other settings; choose another "
                "folder",
                param="out",
            )
        return
    path.write_text(_note(depends_on), encoding="utf-8")


def _note(depends_on: Mapping[str, str]) -> str:
    return json.dumps(dict(depends_on), indent=2) + "\n"
