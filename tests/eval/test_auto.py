"""Calibrating ``auto``: weights and margins by hand, replay, and the command on a tiny model."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chunkcache.auto_calibration import auto_table
from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.auto_table import CONFIDENCE, AutoTable
from chunkcache.settings import Settings
from chunkcache_eval.auto import run as auto_run
from chunkcache_eval.auto.fit import fit_table, fit_weights
from chunkcache_eval.auto.trace import Point, Trace, chosen_point
from chunkcache_eval.auto.trace_log import TraceLog
from chunkcache_eval.auto.validation import check_target, fixed_ratios, high
from chunkcache_eval.cli import app
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.question_set import QuestionSet

TARGETS = (0.01, 0.05, 0.2)


def _trace(number: int, kl: float, signal: float) -> Trace:
    """Half as far off at the second ratio."""
    points = tuple(
        Point(ratio, kl * share, ratio + 0.05, (signal + math.log(share), 0.0, 1.0))
        for ratio, share in ((0.1, 1.0), (0.3, 0.5))
    )
    return Trace("made", str(number), f"{number}", 100, 1.1, points)


def _made(num_traces: int, noise: float, seed: int) -> list[Trace]:
    generator = torch.Generator().manual_seed(seed)
    level = torch.randn(num_traces, generator=generator) - 4
    off = noise * torch.randn(num_traces, generator=generator)
    pairs = zip(level.tolist(), off.tolist(), strict=True)
    return [_trace(i, math.exp(x + e), x / 2) for i, (x, e) in enumerate(pairs)]


def _table(traces: list[Trace]) -> AutoTable:
    return fit_table(traces, model_name="made", preparation="alone", codec="raw", fingerprint="00")


def test_weights_find_what_signals_say() -> None:
    """The logarithm of the divergence is twice the signal, at the second ratio less ln 2."""
    (first, second) = fit_weights(_made(60, 0.0, 1))
    assert first == pytest.approx((0.0, 2.0, 0.0, 0.0), abs=0.05)
    assert second[1] == pytest.approx(2.0, abs=0.02)
    assert second[0] == pytest.approx(math.log(2), abs=0.05)


def test_the_least_ratio_whose_bound_is_within_the_target_is_chosen() -> None:
    trace = _trace(0, 0.08, 0.0)
    assert chosen_point(trace, [0.04, 0.01], 0.05) == trace.points[0]
    assert chosen_point(trace, [0.06, 0.05], 0.05) == trace.points[1]
    assert chosen_point(trace, [0.06, 0.051], 0.05) is None


def test_nine_in_ten_meet_their_target_on_questions_that_were_held_back() -> None:
    """1. With signals that say something. 2. With signals that say nothing, at a higher cost."""
    costs = []
    for noise in (0.3, 2.0):
        table, held_back = _table(_made(600, noise, 1)), _made(1500, noise, 2)
        checks = [check_target(table, held_back, t) for t in TARGETS]
        assert all(c.met_ratio >= CONFIDENCE - 0.03 for c in checks)
        costs.append(checks[1].charged_ratio)
        assert [c.charged_ratio for c in checks] == sorted(c.charged_ratio for c in checks)[::-1]
    assert costs[0] < costs[1]


def test_the_fixed_ratio_that_comes_as_close_by_hand() -> None:
    """Ten questions of one divergence: 0.08 at 10 %, 0.04 at 30 %; halfway in the logarithm."""
    traces = [_trace(i, 0.08, 0.0) for i in range(10)]
    fixed = fixed_ratios(traces)
    assert [(f.ratio, f.high_kl) for f in fixed] == [(0.1, 0.08), (0.3, 0.04), (1.0, 0.0)]
    assert [f.charged_ratio for f in fixed] == pytest.approx([0.15, 0.35, 1.1])
    check = check_target(_table(_made(40, 0.3, 1)), traces, 0.05)
    assert check.same_promise_charged_ratio == pytest.approx(0.35)
    assert high([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 10.0, 9.0]) == 9.0


def test_a_log_goes_on_where_it_was_and_is_of_one_model(tmp_path: Path) -> None:
    """1. A torn line is cut off. 2. A question that reads otherwise is none. 3. Another model."""
    log = TraceLog(tmp_path / "out", {"fingerprint": "a"})
    traces = _made(3, 0.1, 1)
    for trace in traces:
        log.append(trace)
    path = tmp_path / "out" / "traces.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = TraceLog(tmp_path / "out", {"fingerprint": "a"})
    assert again.get("made", "0", "0") == traces[0]
    assert again.get("made", "0", "another text") is None
    assert again.get("made", "2", "2") is None
    with pytest.raises(InvalidValueError, match="another model"):
        TraceLog(tmp_path / "out", {"fingerprint": "b"})
    path.write_text("{}\n")
    with pytest.raises(InvalidValueError, match=r"traces\.jsonl:1"):
        TraceLog(tmp_path / "out", {"fingerprint": "a"})


def _question(number: int) -> Question:
    texts = (
        f"The harbour opens at {number} in the morning, and the ferry leaves from the pier.",
        f"The key to the tower is kept by the baker. The door code is 40{number}.",
    )
    passages = tuple(Passage(f"p{i}", text) for i, text in enumerate(texts))
    return Question(f"q{number}", f"What is the code of door {number}?", (), passages)


def test_too_few_questions_are_refused(settings: Settings, tmp_path: Path) -> None:
    questions = QuestionSet("few", "", (_question(1), _question(2)))
    with pytest.raises(InvalidValueError, match="20 are needed"):
        auto_run.calibrate_auto([questions], tmp_path, TARGETS, settings=settings)
    neighbours = settings.model_copy(update={"preparation": "neighbours(2)"})
    with pytest.raises(InvalidValueError, match="corpus"):
        auto_run.calibrate_auto([questions], tmp_path, TARGETS, settings=neighbours)


def test_the_command_calibrates_a_model_so_that_auto_works(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. JSON on stdout. 2. Kept under the model. 3. A second run measures nothing anew."""
    for module in ("run", "fit"):
        monkeypatch.setattr(f"chunkcache_eval.auto.{module}.MIN_QUESTIONS", 9)
    data = tmp_path / "doors.jsonl"
    lines = []
    for question in map(_question, range(26)):
        chunks = [{"id": p.passage_id, "text": p.text} for p in question.passages]
        lines.append(
            json.dumps(
                {"id": question.question_id, "question": question.question, "chunks": chunks}
            )
        )
    data.write_text("\n".join(lines))
    for name in ("model", "cache_dir", "codec"):
        monkeypatch.setenv(f"CHUNKCACHE_{name.upper()}", str(getattr(settings, name)))
    monkeypatch.setenv("CHUNKCACHE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("CHUNKCACHE_POOL_TOKENS", "4096")
    args = ["eval", "auto", "--data", str(data), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*args, "--keep", "--target", "0.05", "--json"])
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    (check,) = body["checks"]
    assert check["num_questions"] + body["table"]["num_questions"] == 26
    assert 0 <= check["met_ratio"] <= 1
    traces = (tmp_path / "out" / "traces.jsonl").read_bytes()
    assert len(traces.splitlines()) == 26
    opened = {"store": tmp_path / "store", "model": settings.model, "codec": settings.codec}
    with ChunkCache.open(**opened, cache_dir=settings.cache_dir) as cache:
        assert auto_table(cache.runtime).num_questions == body["table"]["num_questions"]
    shown = CliRunner().invoke(app, args)
    assert shown.exit_code == 0, shown.output
    assert "held back" in shown.stdout
    assert (tmp_path / "out" / "traces.jsonl").read_bytes() == traces
