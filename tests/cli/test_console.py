"""Where output goes: one JSON object, no control characters, and a way to stop."""

import json
import os
import signal
import subprocess
import sys

import pytest
import typer

from chunkcache_api.cli.console import ExitCode, print_json, printable, reporting_errors
from chunkcache_api.cli.process_clock import seconds_since_process_start
from chunkcache_api.cli.render import size
from chunkcache_api.cli.stopping import StopRequest


def test_json_has_no_numbers_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": "caf\u00e9"}})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": {"d": "caf\u00e9"}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain caf\u00e9\n\tand more", "plain caf\u00e9\n\tand more"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("left\u202eright", "left\\u202eright"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_interrupt_has_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, reporting_errors(as_json=True):
        raise KeyboardInterrupt
    assert ended.value.exit_code == ExitCode.INTERRUPTED == 130
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "interrupted"


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), reporting_errors(as_json=True):
        _ = 1 / 0


def test_the_first_signal_asks_and_the_handlers_come_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert "once more to abort" in capfd.readouterr().err


def test_the_second_signal_ends_the_process() -> None:
    script = (
        "import os, signal\n"
        "from chunkcache_api.cli.stopping import StopRequest\n"
        "with StopRequest('{}\\n'):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('not reached')\n"
    )
    path = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 130
    assert result.stdout == "{}\n"
    assert "aborted" in result.stderr


def test_the_process_clock_counts_from_the_start_of_the_process() -> None:
    first = seconds_since_process_start()
    assert 0 < first <= seconds_since_process_start()


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(12, "12 B"), (3_565_158, "3.4 MiB"), (64 << 30, "64.0 GiB")]
)
def test_sizes_are_for_people(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown
