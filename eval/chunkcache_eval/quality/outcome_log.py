"""The folder of a quality run: outcomes line by line, and what they were measured with.

A run that was killed goes on where it was: each outcome is a line of its own, written when it is
known. Knows nothing of models.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from chunkcache.errors import InvalidValueError
from chunkcache_eval.quality.outcome import Outcome, decode_outcome, encode_outcome

OutcomeKey = tuple[str, str, str, str, float | None]
"""Data, question, name of the arm, preparation, ratio: what is measured once."""


def key_of(outcome: Outcome) -> OutcomeKey:
    """What an outcome is of."""
    return (
        outcome.data,
        outcome.question_id,
        outcome.policy,
        outcome.preparation,
        outcome.ratio,
    )


class OutcomeLog:
    """Outcomes in ``outcomes.jsonl``, settings in ``run.json``, commands in ``commands.txt``.

    Args:
        folder: Made if it is not there.

    Raises:
        InvalidValueError: The folder cannot be used, or holds a line that is no outcome.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "outcomes.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._outcomes = _read_outcomes(self._path)
            self._file: IO[bytes] = self._path.open("ab")
        except OSError as error:
            raise InvalidValueError(
                f"{folder} cannot be used: {error.strerror}", param="out"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def __contains__(self, key: OutcomeKey) -> bool:
        """Whether it has been measured."""
        return key in self._outcomes

    def get(self, key: OutcomeKey) -> Outcome | None:
        """What was measured."""
        return self._outcomes.get(key)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All, in the order in which they were written."""
        return tuple(self._outcomes.values())

    def append(self, outcome: Outcome) -> None:
        """Write one more."""
        key = key_of(outcome)
        assert key not in self._outcomes, key
        self._file.write(encode_outcome(outcome) + b"\n")
        self._file.flush()
        self._outcomes[key] = outcome

    def bind(self, fingerprint: Mapping[str, str | int]) -> None:
        """Tie the folder to what is measured; values that it has no note of are noted.

        Raises:
            InvalidValueError: It holds results of something else; the message says of what.
        """
        path = self.folder / "run.json"
        try:
            known = json.loads(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise InvalidValueError(f"{path} is damaged", param="out") from error
        for name, value in fingerprint.items():
            if known.get(name, value) != value:
                raise InvalidValueError(
                    f"{self.folder} holds results of another run ({name}: {known[name]} there, "
                    f"{value} now); choose another folder",
                    param="out",
                )
        merged = known | dict(fingerprint)
        if merged != known:
            written = path.with_suffix(".tmp")
            written.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
            os.replace(written, path)

    def remember_command(self, command: str) -> tuple[str, ...]:
        """Note a command that wrote into this folder.

        Returns:
            All of them, the oldest first, each once.
        """
        path = self.folder / "commands.txt"
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        commands = tuple(dict.fromkeys((*known, command)))
        path.write_text("".join(f"{c}\n" for c in commands), encoding="utf-8")
        return commands


def _read_outcomes(path: Path) -> dict[OutcomeKey, Outcome]:
    """What a file holds; a last line that was torn by a kill is cut off."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    outcomes: dict[OutcomeKey, Outcome] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            outcome = decode_outcome(line)
        except msgspec.DecodeError as error:
            raise InvalidValueError(
                f"{path}:{number} is not an outcome: {error}", param="out"
            ) from error
        outcomes[key_of(outcome)] = outcome
    return outcomes
