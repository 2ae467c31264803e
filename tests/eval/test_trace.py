"""Trace replay: forms of traces, what reuse is held against, and the tier itself between them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache_eval.cli import app
from chunkcache_eval.trace.bounds import (
    distinct_tokens,
    optimal_reuse,
    prefix_reuse,
    total_tokens,
    unlimited_reuse,
)
from chunkcache_eval.trace.replay import replay_trace
from chunkcache_eval.trace.requests import TracedRequest, TracedSegment, read_trace


def requests_of(*prompts: str, num_tokens: int = 10) -> list[TracedRequest]:
    """One segment per letter."""
    return [tuple(TracedSegment(letter, num_tokens) for letter in prompt) for prompt in prompts]


def popular_traffic(seed: int, num_requests: int = 250) -> list[TracedRequest]:
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(60)]
    return [
        (
            TracedSegment("system", 40),
            *(
                TracedSegment(f"p{n}", 20 + n % 5 * 30)
                for n in draw.choices(range(60), weights, k=4)
            ),
            TracedSegment(f"question{i}", 12),
        )
        for i in range(num_requests)
    ]


def write_ragpulse(path: Path, requests: Sequence[TracedRequest]) -> Path:
    lines = [
        json.dumps({"t": i, "segments": [["x", s.segment_id, s.num_tokens] for s in request]})
        for i, request in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"t": 1.0, "segments": [["sys", 8, 512], ["user", 9, 7]]}\n'
        '{"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [3, 4, 5]}\n'
    )
    first, second = read_trace(path)
    assert first == (TracedSegment("sys/8", 512), TracedSegment("user/9", 7))
    assert second == (TracedSegment("3", 512), TracedSegment("4", 512), TracedSegment("5", 76))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"t": 1}', '{"segments": [["a", 1, 0]]}', '{"segments": [[1, 2]]}']
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"segments": [["a", 1, 5]]}\n' + line + "\n")
    with pytest.raises(InvalidValueError, match=r"trace\.jsonl:2"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(InvalidValueError, match="no requests"):
        read_trace(path)


def test_bounds_by_hand() -> None:
    requests = requests_of("abc", "abd", "bac", "abc")
    assert (total_tokens(requests), distinct_tokens(requests)) == (120, 40)
    assert unlimited_reuse(requests) == 80
    assert prefix_reuse(requests) == 50
    assert optimal_reuse(requests, 40) == 80
    # Room for one of: a at 1, 3, 4 and b at 1, 2, 3, 4 - b b a ... the next use decides.
    assert optimal_reuse(requests_of("a", "b", "a", "b", "a"), 10) == 20
    assert optimal_reuse(requests, 9) == 0


def test_no_policy_beats_the_future_or_needs_more_than_everything() -> None:
    report = replay_trace(popular_traffic(0), [0.1, 0.3, 1.0], ["value", "s3fifo", "lru"])
    assert report.prefix_only < report.unlimited
    optimum = {point.capacity: point.token_reuse for point in report.optimum}
    for run in report.runs:
        assert run.token_reuse <= report.unlimited + 1e-9
        if run.capacity == 1.0:
            assert run.token_reuse == pytest.approx(report.unlimited)
            assert (run.evictions, run.rejections) == (0, 0)
        else:
            assert run.token_reuse < optimum[run.capacity]
    reuse = {(run.policy, run.capacity): run.token_reuse for run in report.runs}
    assert reuse["value", 0.1] > reuse["lru", 0.1]


def test_the_same_trace_gives_the_same_report() -> None:
    requests = popular_traffic(1, 80)
    assert replay_trace(requests, [0.2], ["value"]) == replay_trace(requests, [0.2], ["value"])


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    trace = write_ragpulse(tmp_path / "trace.jsonl", popular_traffic(2, 60))
    plot = tmp_path / "reuse.png"
    arguments = ["eval", "trace", str(trace), "--capacity", "0.1", "--capacity", "0.5"]
    done = CliRunner().invoke(app, [*arguments, "--policy", "lru", "--plot", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    body = json.loads(done.stdout)
    assert {"prefix_only", "unlimited", "runs", "optimum"} <= body.keys()
    assert [(run["policy"], run["capacity"]) for run in body["runs"]] == [
        ("lru", 0.1),
        ("lru", 0.5),
    ]
    assert all(run.keys() >= {"token_reuse", "evictions"} for run in body["runs"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = CliRunner().invoke(app, [*arguments, "--policy", "value"])
    assert table.exit_code == 0
    assert "optimum" in table.stdout


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    requests = requests_of("ab", "ab")
    with pytest.raises(InvalidValueError, match="capacity"):
        replay_trace(requests, [0.0], ["lru"])
    with pytest.raises(InvalidValueError, match="mru"):
        replay_trace(requests, [0.5], ["mru"])
    done = CliRunner().invoke(app, ["eval", "trace", str(tmp_path / "none"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "invalid_value"
