"""``eval store`` on a tiny model: what it reports adds up. No time is judged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache.model.loading import LoadedModel
from chunkcache.model_opening import load_configured_model
from chunkcache.settings import Settings
from chunkcache_eval.cli import app
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.measure import AnswerLengths
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.question_set import QuestionSet
from chunkcache_eval.store.fidelity import compare_codecs, measure_fidelity
from chunkcache_eval.store.loads import measure_loads
from chunkcache_eval.store.table import print_fidelity, print_loads

QUESTION = Question(
    "q1",
    "Who keeps the key?",
    ("the baker",),
    (
        Passage("p1", "The key is kept by the baker. The door code is 4017."),
        Passage("p2", "The bridge was built in 1902 over the river Alm."),
    ),
)
ModelDirs = Callable[..., Path]

OUTCOME = Outcome(
    data="d",
    question_id="q1",
    task="",
    policy="none",
    preparation="alone",
    ratio=None,
    charged_ratio=0.1,
    prompt_tokens=100,
    kl_first=0.1,
    mean_kl=0.10,
    agreement=1.0,
    f1=None,
    exact_match=None,
    contains=None,
    full_f1=None,
    none_f1=None,
    ttft_ms=1.0,
    full_ttft_ms=2.0,
    answer="a",
    full_answer="a",
)


def test_loads_add_up(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    small = settings.model_copy(update={"chunk_tokens": 70})
    lines: list[str] = []
    report = measure_loads(
        small, ["raw", "bf16", "int8", "fp8"], num_chunks=3, repeats=2, progress=lines.append
    )
    by_name = {codec.codec: codec for codec in report.codecs}
    assert list(by_name) == ["raw", "bf16", "int8", "fp8"]
    assert by_name["raw"].bytes_per_token == 2 * by_name["bf16"].bytes_per_token
    assert by_name["int8"].bytes_per_token == by_name["fp8"].bytes_per_token
    for codec in report.codecs:
        assert codec.stored_bytes_per_token > codec.bytes_per_token
        assert codec.gb_s == pytest.approx(codec.tokens_s * codec.bytes_per_token / 1e9)
        assert codec.memcpy_share == pytest.approx(codec.gb_s / report.memcpy_gb_s)
        assert codec.load_ms > 0
        assert codec.place_ms > 0
    assert (report.chunk_tokens, report.num_chunks, report.dtype) == (70, 3, "float32")
    assert lines[-1] == "round 2 of 2"
    print_loads(report)
    shown = capsys.readouterr().out
    assert "of memcpy" in shown
    assert "int8" in shown


def test_codecs_are_compared_question_by_question() -> None:
    other = replace(OUTCOME, question_id="q2", mean_kl=0.50)
    exact = replace(OUTCOME, policy="full", mean_kl=0.0)
    outcomes = {
        "raw": (OUTCOME, other, exact),
        "int8": (replace(other, mean_kl=0.52), replace(OUTCOME, mean_kl=0.11), exact),
        "fp8": (replace(OUTCOME, mean_kl=0.2),),
    }
    raw, int8, fp8 = compare_codecs(outcomes)
    assert (raw.codec, raw.added_mean_kl, raw.n) == ("raw", 0.0, 2)
    assert int8.added_mean_kl == pytest.approx(0.015)
    assert int8.mean_kl == pytest.approx(0.315)
    assert int8.added_low is not None
    assert int8.added_low == pytest.approx(0.01)
    assert (fp8.n, fp8.added_mean_kl) == (1, pytest.approx(0.1))
    assert fp8.added_low is None, "one question has no interval"


def test_a_run_measures_each_codec_once_and_goes_on_where_it_was(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [QuestionSet("two passages", "digest", (QUESTION,))]
    alone = settings.model_copy(update={"preparation": "alone"})
    lines: list[str] = []

    def measure(codecs: list[str]) -> list[tuple[str, str]]:
        run = measure_fidelity(
            sets,
            codecs,
            tmp_path,
            settings=alone,
            lengths=AnswerLengths(2, 2),
            progress=lines.append,
        )
        print_fidelity(run.codecs)
        assert not run.skipped
        assert all(c.mean_kl >= 0 for c in run.codecs)
        return [(c.codec, c.policy) for c in run.codecs]

    assert measure(["int8"]) == [
        (codec, policy) for codec in ("raw", "int8") for policy in ("hybrid", "none")
    ]
    lines.clear()
    assert [codec for codec, _ in measure(["raw", "int8"])] == ["raw", "raw", "int8", "int8"]
    assert lines == ["codec raw", "codec int8"], "all of it was there"
    assert "added to raw" in capsys.readouterr().out


def test_an_unknown_codec_is_refused(settings: Settings) -> None:
    with pytest.raises(InvalidValueError, match="unknown codec"):
        measure_loads(settings, ["zip"])


def test_the_command_prints_one_object(
    model_dir: ModelDirs, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(cache_dir))
    model = str(model_dir(max_position_embeddings=2048))
    words = ["eval", "store", "--model", model, "--chunk-tokens", "20", "--chunks", "2"]
    done = CliRunner().invoke(app, [*words, "--repeats", "1", "--codec", "int8", "--json"])
    assert done.exit_code == 0, done.stderr
    body = json.loads(done.stdout)
    assert [codec["codec"] for codec in body["codecs"]] == ["int8"]
    assert "fidelity" not in body
    assert "round 1 of 1" in done.stderr
    done = CliRunner().invoke(app, [*words, "--codec", "zip", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "invalid_value"


def test_loads_are_of_the_model_that_the_settings_name(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its adapter, its rounding and all that is to be said of it."""
    given: list[Settings] = []

    def load(wanted: Settings, progress: object) -> LoadedModel:
        given.append(wanted)
        return load_configured_model(settings, lambda line: None)

    monkeypatch.setattr("chunkcache_eval.store.loads.load_configured_model", load)
    small = settings.model_copy(update={"chunk_tokens": 24, "quantisation": "int8"})
    measure_loads(small, ("raw",), num_chunks=1, repeats=1)
    assert given == [small]
