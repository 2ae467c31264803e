"""A server of its own process on loopback, over a store that goes with it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from chunkcache.errors import InvalidValueError

STOP_SECONDS: Final = 60
_SHOWN_LINES: Final = 5


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[str]:
    """Start ``chunkcache serve``; gives its address once it is ready, and stops it afterwards.

    Args:
        options: Of the command, beside those about where it listens and where its store is.

    Raises:
        InvalidValueError: It ended before it was ready; the message holds its last words.
    """
    with tempfile.TemporaryDirectory(prefix="chunkcache-eval-") as folder:
        command = [sys.executable, "-m", "chunkcache_api.cli", "serve", "--json", "--port", "0"]
        command += ["--store", str(Path(folder) / "store"), "--no-retriever", *options]
        # What this process can import, the other one can.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # Repeated prompts would start from kept pages: another thing than what is measured.
        environment = os.environ | {"PYTHONPATH": path, "CHUNKCACHE_KEPT_PROMPTS_RATIO": "0"}
        log = Path(folder) / "log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            ) as process,
        ):
            try:
                yield _address(process, log)
            finally:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(process: "subprocess.Popen[str]", log: Path) -> str:
    """Wait for the one JSON object that a server prints: where it is, or why it is not there."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.rstrip() == "}":
            told = json.loads(text)
            if "url" in told:
                return str(told["url"])
            raise InvalidValueError(f"the server did not start: {told['error']['message']}")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    raise InvalidValueError("the server did not start: " + " / ".join(lines))
