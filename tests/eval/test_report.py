"""The report of a quality run: complete, self-contained, escaped, the same bytes each time."""

import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from chunkcache_eval.quality.html_report import write_report
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.plots import PlottingUnavailableError, draw_plots, require_plotting
from chunkcache_eval.quality.summary import ArmSummary, summarise

MARKUP = '<script>a("x")</script>&$\\x{$'
COMMAND = "chunkcache eval quality --data 'a & b.jsonl' --out results"
FACTORS = {"none": 1.0, "cacheblend": 0.7, "hybrid": 0.3, "full": 0.0}
RATIOS: dict[str, list[float | None]] = {"none": [None], "full": [None]}
PNG = b"\x89PNG\r\n\x1a\n"


def _outcomes(data: str = "d", tasks: tuple[str, ...] = ("one", "two"), **changes: Any) -> Any:
    return [
        _outcome(data, question, tasks[question % len(tasks)], policy, preparation, ratio, changes)
        for question in range(4)
        for preparation in ("alone", "preamble")
        for policy in FACTORS
        for ratio in RATIOS.get(policy, [0.05, 0.2])
    ]


def _outcome(
    data: str,
    question: int,
    task: str,
    policy: str,
    preparation: str,
    ratio: float | None,
    changes: dict[str, Any],
) -> Outcome:
    kl = FACTORS[policy] * (question + 1) * (0.1 if preparation == "alone" else 0.05)
    kl *= 1 - 2 * (ratio or 0)
    charged = 1.0 if policy == "full" else (ratio or 0.0)
    values: dict[str, Any] = {
        "prompt_tokens": 1000,
        "kl_first": kl,
        "mean_kl": kl,
        "agreement": 1 / (1 + 10 * kl),
        "f1": 0.5 - kl / 4,
        "exact_match": 0.0,
        "contains": 1.0,
        "full_f1": 0.5,
        "none_f1": 0.2,
        "ttft_ms": 50 + 950 * charged,
        "full_ttft_ms": 1000.0,
        "answer": f"fused {policy} {question}",
        "full_answer": f"full {question}",
    }
    values |= {"charged_ratio": charged, **changes}
    return Outcome(data, f"q{question}", task, policy, preparation, ratio, **values)


def _page(folder: Path, outcomes: list[Outcome]) -> str:
    return write_report(folder, outcomes, [COMMAND]).read_text(encoding="utf-8")


def test_every_arm_question_and_command_is_shown(tmp_path: Path) -> None:
    outcomes = [*_outcomes(), *_outcomes("e", tasks=("one",))]
    page = _page(tmp_path / "new" / "folder", outcomes)
    assert page.count("<b>hybrid</b>, preamble, 20%") == 5, "twice an arm, twice best, once by task"
    for name in ("none", "full"):
        for preparation in ("alone", "preamble"):
            assert page.count(f"<b>{name}</b>, {preparation}") == 3
    assert page.count("By task") == 1, "the second data set has one task only"
    assert page.count("fused hybrid 3") == 2
    assert page.index("fused hybrid 3") < page.index("fused hybrid 2"), "furthest first"
    assert page.count("full 3") == 2
    assert "chunkcache eval quality --data &#39;a &amp; b.jsonl&#39; --out results" in page
    tagged = re.findall(r'class="tag">([0-9]+%)', page)
    assert sorted(tagged) == sorted(2 * ["5%", "10%", "15%", "20%", "30%"])
    assert len(re.findall(r'class="clear"', page)) > 0


def test_methods_are_named_by_their_source(tmp_path: Path) -> None:
    page = _page(tmp_path, _outcomes())
    assert page.count("<small>CacheBlend, arXiv:2405.16444</small>") == 4, "one per arm"
    assert page.count("<small>concatenation</small>") == 2
    of_others = [Outcome(**{**_fields(o), "policy": "of old"}) for o in _outcomes()]
    assert "<b>of old</b>" in _page(tmp_path, of_others)


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    page = _page(tmp_path, _outcomes())
    assert "http:" not in page
    assert "https:" not in page
    assert "<script" not in page
    assert "<link" not in page
    assert "url(" not in page
    sources = re.findall(r'src="([^"]{0,22})', page)
    assert sources == 3 * ["data:image/png;base64,"]
    assert "prefers-color-scheme: dark" in page


def test_markup_in_data_stays_text(tmp_path: Path) -> None:
    marked = [
        Outcome(**{**_fields(o), **dict.fromkeys(("data", "policy", "task", "answer"), MARKUP)})
        for o in _outcomes()
    ]
    page = _page(tmp_path, marked)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 4
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.html",
        "plot-1-kl-by-charged-ratio.png",
        "plot-1-kl-by-ttft.png",
        "plot-1-agreement-by-charged-ratio.png",
    }


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}


def test_the_same_outcomes_give_the_same_bytes(tmp_path: Path) -> None:
    outcomes = _outcomes()
    write_report(tmp_path / "a", outcomes, [COMMAND])
    write_report(tmp_path / "b", outcomes[::-1], [COMMAND])
    first, second = (
        {p.name: p.read_bytes() for p in (tmp_path / folder).iterdir()} for folder in "ab"
    )
    assert first == second


def test_plots_are_pictures_of_some_size() -> None:
    plots = draw_plots(summarise(_outcomes(), resamples=50))
    assert len({p.name for p in plots}) == 3
    for plot in plots:
        assert plot.png.startswith(PNG)
        width, height = struct.unpack(">II", plot.png[16:24])
        assert (width, height >= 500) == (960, True)
        assert b"tIME" not in plot.png
        assert b"tEXt" not in plot.png


@pytest.mark.parametrize(
    "changes",
    [
        {"mean_kl": 0.0},
        {"full_ttft_ms": 0.0},
        {"charged_ratio": 1.0},
        {"charged_ratio": 0.0},
        {"f1": None, "full_f1": None, "none_f1": None, "exact_match": None, "contains": None},
    ],
)
def test_odd_outcomes_still_make_a_report(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert "<b>hybrid</b>, preamble, 20%" in _page(tmp_path, _outcomes(**changes))


def test_nothing_answered_is_said(tmp_path: Path) -> None:
    assert "No question was answered" in _page(tmp_path, [])


def test_arms_without_common_questions_stand_side_by_side(tmp_path: Path) -> None:
    first, second = _outcomes()[0], _outcomes()[-2]
    assert (first.question_id, second.question_id) == ("q0", "q3")
    assert "<b>none</b>, alone" in _page(tmp_path, [first, second])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    arms: list[ArmSummary] = summarise(_outcomes(), resamples=50)
    with pytest.raises(PlottingUnavailableError, match="'eval' extra") as caught:
        draw_plots(arms)
    assert caught.value.code == "plotting_unavailable"
    with pytest.raises(PlottingUnavailableError):
        require_plotting()
