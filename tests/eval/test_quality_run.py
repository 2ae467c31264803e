"""A quality run on a tiny model: sound numbers, the same ones each time, none measured twice."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chunkcache.errors import InvalidValueError
from chunkcache.settings import Settings
from chunkcache_eval.cli import app
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.arms import Arm, arms_for
from chunkcache_eval.quality.html_report import write_report
from chunkcache_eval.quality.measure import AnswerLengths
from chunkcache_eval.quality.outcome import Outcome, decode_outcome, encode_outcome
from chunkcache_eval.quality.outcome_log import OutcomeLog, key_of
from chunkcache_eval.quality.question_set import QuestionSet
from chunkcache_eval.quality.run import QualityRun, measure_quality

TEXTS = (
    "The harbour opens at seven in the morning, and the ferry leaves at nine from the pier.",
    "The key to the tower is kept by the baker. The door code is 4017.",
    "The bridge was built in 1902 over the river Alm. It carries two tracks.",
)


def _question(number: int, **fields: Any) -> Question:
    order = [*range(number % 3, 3), *range(number % 3)]
    defaults: dict[str, Any] = {
        "question_id": f"q{number}",
        "question": "Who keeps the key?",
        "answers": ("the baker",),
        "passages": tuple(Passage(f"p{i}", TEXTS[i]) for i in order),
        "task": "keys",
    }
    return Question(**(defaults | fields))


QUESTIONS = QuestionSet("tiny", "0" * 64, (_question(0), _question(1), _question(2, answers=())))
ARMS = arms_for(
    ["hybrid", "cacheblend", "cacheblend-as-shipped", "infoflow", "prefix-cache"],
    ["alone", "sink(2)"],
    [0.25],
)
LENGTHS = AnswerLengths(3, 5)
TIMES = {"ttft_ms", "full_ttft_ms"}

MeasureIn = Callable[..., QualityRun]


@pytest.fixture
def measure_in(tmp_path: Path, settings: Settings) -> MeasureIn:
    def measure(
        folder: str,
        *,
        sets: tuple[QuestionSet, ...] = (QUESTIONS,),
        arms: tuple[Arm, ...] = ARMS,
        lengths: AnswerLengths = LENGTHS,
        progress: Callable[[str], None] = lambda line: None,
        **changed: Any,
    ) -> QualityRun:
        with OutcomeLog(tmp_path / folder) as log:
            return measure_quality(
                sets,
                arms,
                log,
                settings=settings.model_copy(update=changed),
                lengths=lengths,
                progress=progress,
            )

    return measure


def _without_times(outcomes: tuple[Outcome, ...]) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(o).items() if k not in TIMES} for o in outcomes]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_outcomes_are_sound(measure_in: MeasureIn, tmp_path: Path) -> None:
    run = measure_in("out")
    assert len(run.outcomes) == len(ARMS) * 3
    assert not run.skipped
    assert [asdict(o) for o in run.outcomes] == _lines(tmp_path / "out" / "outcomes.jsonl")
    none_f1 = {(o.question_id, o.preparation): o.f1 for o in run.outcomes if o.policy == "none"}
    for o in run.outcomes:
        assert o.ttft_ms > 0
        assert o.full_ttft_ms > 0
        assert o.none_f1 == none_f1[o.question_id, o.preparation]
        assert (o.f1 is None) == (o.question_id == "q2") == (o.full_f1 is None)
        assert o.task == "keys"
        if o.policy in ("full", "prefix-cache"):
            assert (o.kl_first, o.mean_kl, o.agreement) == (0.0, 0.0, 1.0)
            assert o.charged_ratio > 1 or o.policy == "prefix-cache"
            assert o.answer == o.full_answer
        else:
            assert o.kl_first > 0
            assert o.mean_kl > 0
            assert o.charged_ratio < 1.5
    of_q0 = {o.policy: o for o in run.outcomes if o.question_id == "q0"}
    assert len({o.prompt_tokens for o in run.outcomes if o.question_id == "q0"}) == 1
    times = {o.full_ttft_ms for o in run.outcomes if o.question_id == "q0"}
    assert len(times) == 1, "the full prefill ran once for both preparations"
    assert of_q0["none"].charged_ratio < of_q0["hybrid"].charged_ratio


def test_a_recompute_of_everything_is_the_full_prefill(measure_in: MeasureIn) -> None:
    """The forced pass and the generation see the same prompt.

    1. full: logits of each greedy step, one token at a time.
    2. cacheblend at a ratio just under 1: every row runs at every layer, the answer rides along.
    """
    run = measure_in("out", arms=arms_for(["cacheblend"], ["alone"], [0.9999]))
    near = [o for o in run.outcomes if o.policy == "cacheblend"]
    assert all(o.mean_kl < 1e-6 and o.kl_first < 1e-6 and o.agreement == 1.0 for o in near)


def test_two_runs_give_the_same_bytes_apart_from_times(
    measure_in: MeasureIn, tmp_path: Path
) -> None:
    """The lines of both files, and of reports over them, with all times set to 1 ms."""
    written = []
    for name in "ab":
        run = measure_in(name)
        timeless = [replace(o, **dict.fromkeys(TIMES, 1.0)) for o in run.outcomes]
        in_file = map(
            decode_outcome, (tmp_path / name / "outcomes.jsonl").read_bytes().splitlines()
        )
        assert list(in_file) == list(run.outcomes)
        write_report(tmp_path / f"report-{name}", timeless, ["chunkcache eval quality"])
        files = {p.name: p.read_bytes() for p in (tmp_path / f"report-{name}").iterdir()}
        written.append((b"".join(map(encode_outcome, timeless)), files))
    assert written[0] == written[1]


class _Killed(Exception):
    pass


def _kill_after(num_outcomes: int, seen: list[str]) -> Callable[[str], None]:
    def progress(line: str) -> None:
        if " left" in line:
            seen.append(line)
        if len(seen) == num_outcomes:
            raise _Killed

    return progress


def test_a_killed_run_goes_on_and_measures_nothing_twice(
    measure_in: MeasureIn, tmp_path: Path
) -> None:
    whole = measure_in("whole")
    first: list[str] = []
    with pytest.raises(_Killed):
        measure_in("out", progress=_kill_after(7, first))
    path = tmp_path / "out" / "outcomes.jsonl"
    assert len(_lines(path)) == 7
    with path.open("ab") as file:
        file.write(b'{"data":"tiny","question_id":"q')
    rest: list[str] = []
    run = measure_in("out", progress=lambda line: rest.append(line) if " left" in line else None)
    assert _without_times(run.outcomes) == _without_times(whole.outcomes)
    assert len(rest) == len(whole.outcomes) - 7
    assert rest[0].startswith(f"1/{len(rest)} ")
    assert "0 min 00 s left" in rest[-1]
    assert len(_lines(path)) == len(whole.outcomes)

    again: list[str] = []
    assert measure_in("out", progress=again.append).outcomes == run.outcomes
    assert again == [], "nothing is opened where nothing is missing"


def test_a_folder_takes_more_arms_and_more_questions(measure_in: MeasureIn) -> None:
    few = QuestionSet(QUESTIONS.name, QUESTIONS.digest, QUESTIONS.questions[:1])
    small = measure_in("out", sets=(few,), arms=arms_for(["epic"], ["alone"], []))
    assert [o.policy for o in small.outcomes] == ["none", "full", "epic"]
    large = measure_in("out", arms=arms_for(["hybrid"], ["alone"], [0.25]))
    assert {key_of(o) for o in large.outcomes} >= {key_of(o) for o in small.outcomes[:2]}
    assert len(large.outcomes) == 9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"codec": "bf16"}, "codec: raw there, bf16 now"),
        ({"lengths": AnswerLengths(2, 5)}, "compared_tokens: 3 there, 2 now"),
        ({"sets": (QuestionSet("tiny", "1" * 64, QUESTIONS.questions),)}, "digest of tiny"),
        ({"dtype": "bfloat16"}, "model_digest"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    measure_in: MeasureIn, changes: dict[str, Any], named: str
) -> None:
    one = (QuestionSet("tiny", QUESTIONS.digest, QUESTIONS.questions[:1]),)
    measure_in("out", sets=one, arms=arms_for(["none"], ["alone"], []))
    with pytest.raises(InvalidValueError, match=named):
        measure_in("out", **({"arms": arms_for(["epic"], ["alone"], [])} | changes))


def test_questions_that_cannot_be_asked_are_skipped_and_named(measure_in: MeasureIn) -> None:
    def passages(*texts: str) -> tuple[Passage, ...]:
        return tuple(Passage(f"p{i}", text) for i, text in enumerate(texts))

    questions = (
        _question(0),
        _question(3, passages=passages("word " * 3000)),
        _question(4, passages=passages("word " * 510)),
        _question(7, passages=passages("word " * 480)),
        _question(5, passages=passages(TEXTS[0], " \n")),
        _question(6, question="\ud800"),
    )
    arms = arms_for(["none"], ["alone", "sink(2)"], [])
    sets = (QuestionSet("tiny", "2", questions),)
    run = measure_in("out", sets=sets, arms=arms, lengths=AnswerLengths(3, 100))
    assert {o.question_id for o in run.outcomes} == {"q0"}
    reasons = {s.question_id: s.reason for s in run.skipped}
    assert set(reasons) == {"q3", "q4", "q5", "q6", "q7"}
    assert len(run.skipped) == 5, "once each, whatever the number of preparations"
    assert "context tokens do not fit 2048" in reasons["q3"]
    assert "must fit 2048" in reasons["q4"]
    assert "answer tokens of 100" in reasons["q7"]
    assert "'p1'" in reasons["q5"]
    assert "Unicode" in reasons["q6"]


def test_passages_are_told_apart_by_their_text(measure_in: MeasureIn) -> None:
    """Two files' worth of questions may use one id for different texts."""
    first = _question(0, passages=(Passage("1", TEXTS[0]), Passage("2", TEXTS[1])))
    second = _question(1, passages=(Passage("1", TEXTS[2]), Passage("2", TEXTS[1] + " So it is.")))
    arms = arms_for(["none"], ["alone"], [])
    both = measure_in("both", sets=(QuestionSet("tiny", "3", (first, second)),), arms=arms)
    alone = measure_in("alone", sets=(QuestionSet("tiny", "4", (first,)),), arms=arms)
    assert _without_times(both.outcomes)[:2] == _without_times(alone.outcomes)


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "outcomes.jsonl").write_text("{}\n")
    with pytest.raises(InvalidValueError, match=r"outcomes\.jsonl:1"):
        OutcomeLog(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match="cannot be used"):
        OutcomeLog(tmp_path / "file")


@pytest.fixture
def command(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(settings.cache_dir))
    monkeypatch.setenv("CHUNKCACHE_POOL_TOKENS", "4096")
    monkeypatch.setenv("CHUNKCACHE_STORE_MAX_BYTES", str(1 << 30))

    def run(*args: str) -> Any:
        fixed = ["--model", settings.model, "--out", str(tmp_path / "out")]
        return CliRunner().invoke(app, ["eval", "quality", *fixed, *args])

    return run


def _data_file(path: Path, *broken: str) -> Path:
    lines = [
        json.dumps(
            {
                "id": f"q{number}",
                "question": "Who keeps the key?",
                "answers": ["the baker"] if number else [],
                "meta": {"task": "chain2" if number else "niah_multivalue"},
                "chunks": [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)],
            }
        )
        for number in range(3)
    ]
    path.write_text("\n".join([*lines, *broken]) + "\n", encoding="utf-8")
    return path


FIELDS = "data policy preparation ratio charged_ratio n kl_first mean_kl agreement f1 gap_recovery "
FIELDS += "ttft_ms full_ttft_ms"


def test_the_command_measures_and_reports(command: Callable[..., Any], tmp_path: Path) -> None:
    data = _data_file(tmp_path / "mine.jsonl", "{}")
    options = ["--data", str(data), "--policy", "hybrid", "--preparation", "alone", "--limit", "2"]
    options += ["--answer-tokens", "2", "--f1-tokens", "3", "--ratio", "0.2"]
    result = command(*options, "--json")
    assert result.exit_code == 3, result.output
    body = json.loads(result.stdout)
    assert [(a["policy"], a["n"]) for a in body["arms"]] == [
        ("full", 2),
        ("hybrid", 2),
        ("none", 2),
    ]
    assert all(set(FIELDS.split()) <= set(arm) for arm in body["arms"])
    for arm in body["arms"]:
        assert [(t["task"], t["n"]) for t in arm["tasks"]] == [
            ("chain2", 1),
            ("niah_multivalue", 1),
        ]
        assert all(set(FIELDS.split()) <= set(task) for task in arm["tasks"])
        assert sum(t["mean_kl"] for t in arm["tasks"]) / 2 == pytest.approx(arm["mean_kl"])
        chain, multivalue = arm["tasks"]
        assert chain["f1"] is not None
        assert multivalue["f1"] is None, "no gold answers: fidelity alone"
        assert multivalue["agreement"] is not None
    assert len(body["broken_lines"]) == 1
    assert "mine.jsonl:4" in body["broken_lines"][0]
    page = Path(body["report"]).read_text(encoding="utf-8")
    assert "chunkcache eval quality --model" in page

    table = command(*options)
    assert table.exit_code == 3
    assert "hybrid" in table.stdout
    assert "mine by task" in table.stdout
    assert "chain2" in table.stdout
    assert "niah_multivalue" in table.stdout
    assert len(_lines(tmp_path / "out" / "outcomes.jsonl")) == 6


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--policy", "best"], "cacheblend"),
        (["--policy", "epic(-4)"], "negative"),
        (["--policy", "hybrid(-1)"], "negative"),
        (["--policy", "prefix-cache(3)"], "no parameter 'first_tokens'"),
        (["--preparation", "sink(-1)"], "alone, sink(k), system, preamble"),
        (["--ratio", "-0.1"], "not within 0 and 1"),
        (["--preparation", "system("], "preamble"),
        (["--ratio", "1.5"], "not within 0 and 1"),
        (["--answer-tokens", "9", "--f1-tokens", "8"], "answer tokens"),
        (["--data", "nowhere.jsonl"], "cannot be read"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    command: Callable[..., Any], tmp_path: Path, args: list[str], named: str
) -> None:
    result = command(*args, "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "invalid_value"
    assert named in error["message"]
    assert not (tmp_path / "out").exists()


def test_a_file_of_unknown_fields_is_refused_before_a_model_is_loaded(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "?", "passages": []}\n', encoding="utf-8")
    result = command("--data", str(path), "--json")
    assert result.exit_code == 1
    message = json.loads(result.stdout)["error"]["message"]
    assert "its records have passages, prompt" in message
    assert "records (id, question, chunks)" in message
    assert "LongBench (_id, input, context)" in message
    assert not (tmp_path / "out").exists()


def test_the_command_explains_itself() -> None:
    result = CliRunner().invoke(app, ["eval", "quality", "--help"])
    assert result.exit_code == 0
    assert "--preparation" in result.output
