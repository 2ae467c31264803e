"""A quality run with neighbours: from the whole file, from no prompt of the chunk's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkcache.catalog import Catalog
from chunkcache.chunk_cache import DEFAULT_TENANT
from chunkcache.errors import InvalidValueError
from chunkcache.identity import ChunkId, tenant_namespace
from chunkcache.settings import Settings, load_settings
from chunkcache.store.environment import StoreEnvironment
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.arms import arms_for
from chunkcache_eval.quality.measure import AnswerLengths, document_id_of
from chunkcache_eval.quality.neighbours import neighbour_source
from chunkcache_eval.quality.outcome_log import OutcomeLog
from chunkcache_eval.quality.question_set import QuestionSet
from chunkcache_eval.quality.run import QualityRun, measure_quality
from chunkcache_eval.quality.summary import summarise

PREPARATION = "neighbours(2)"
TEXTS = [
    f"The {place} opens at {hour}. Its {thing} is kept by the {who}, and the code is {hour * 37}."
    for hour, (place, thing, who) in enumerate(
        (place, thing, who)
        for place in ("harbour", "tower", "bridge")
        for thing, who in (("key", "baker"), ("lamp", "porter"))
    )
]
PASSAGES = [Passage(f"p{i}", text) for i, text in enumerate(TEXTS)]


def _question(number: int, *indexes: int) -> Question:
    passages = tuple(PASSAGES[i] for i in indexes)
    return Question(f"q{number}", "Who keeps the key?", ("the baker",), passages)


FILE = (_question(0, 0, 1), _question(1, 1, 2), _question(2, 3, 4), _question(3, 4, 5))
QUESTIONS = QuestionSet("tiny", "0" * 64, FILE[:2], FILE[2:])
OTHERS = QuestionSet(
    "other", "1" * 64, (Question("q", "Who?", (), (Passage("x", TEXTS[0] + " So it is."),)),)
)

MeasureIn = Callable[..., QualityRun]


@pytest.fixture
def settings(model_dir: Callable[..., Path], cache_dir: Path) -> Settings:
    return load_settings(
        model=str(model_dir(max_position_embeddings=8192)),
        cache_dir=cache_dir,
        pool_tokens=4096,
        store_max_bytes=1 << 30,
    )


@pytest.fixture
def measure_in(tmp_path: Path, settings: Settings) -> MeasureIn:
    def measure(
        folder: str, source: str = "overlap", sets: tuple[QuestionSet, ...] = (QUESTIONS,)
    ) -> QualityRun:
        with OutcomeLog(tmp_path / folder) as log:
            return measure_quality(
                sets,
                arms_for(["none"], [PREPARATION, "alone"], []),
                log,
                settings=settings,
                lengths=AnswerLengths(2, 3),
                neighbours=neighbour_source(source),
            )

    return measure


def _neighbours(store: Path) -> dict[str, set[str]]:
    """What each passage of the store was prepared behind, by passage id."""
    names = {document_id_of(p): p.passage_id for p in PASSAGES}
    with StoreEnvironment.open(store, max_bytes=1 << 30, read_only=True) as env:
        catalog = Catalog(env, tenant_namespace(env.secret, DEFAULT_TENANT))
        owners: dict[ChunkId, str] = {c: names.get(d, d) for c, d, _ in catalog.chunks()}
        found = catalog.get_neighbours(PREPARATION, owners)
    return {owners[c]: {owners[n.chunk_id] for n in behind} for c, behind in found.items()}


@pytest.mark.parametrize("source", ["overlap", "random"])
def test_neighbours_come_from_the_file_and_from_no_prompt_of_the_chunk(
    measure_in: MeasureIn, tmp_path: Path, source: str
) -> None:
    run = measure_in("out", source, (OTHERS, QUESTIONS))
    assert not run.skipped
    found = _neighbours(tmp_path / "out" / "store")
    # Only passages of the questions that are asked are prepared; the others are looked among.
    assert set(found) == {"p0", "p1", "p2"}
    assert found["p1"] <= {"p3", "p4", "p5"}, "not p0 of one question, nor p2 of the other"
    assert found["p0"] <= {"p2", "p3", "p4", "p5"}
    assert all(len(behind) == 2 for behind in found.values())


def test_the_ingest_cost_is_reported(measure_in: MeasureIn) -> None:
    arms = {a.preparation: a for a in summarise(measure_in("out").outcomes) if a.policy == "none"}
    assert arms["alone"].ingest_cost == 1.0
    assert 2.5 < arms[PREPARATION].ingest_cost < 6
    assert arms[PREPARATION].to_dict()["ingest_cost"] == arms[PREPARATION].ingest_cost


def test_two_runs_agree_and_a_third_measures_nothing(measure_in: MeasureIn) -> None:
    """Also where the stores, and so the chunks' ids, are different ones."""
    first, second = measure_in("one"), measure_in("two")
    key = [(o.question_id, o.policy, o.preparation) for o in first.outcomes]
    assert len(key) == len(set(key)) == 8
    for one, two in zip(first.outcomes, second.outcomes, strict=True):
        assert (one.mean_kl, one.answer, one.ingest_cost) == (
            two.mean_kl,
            two.answer,
            two.ingest_cost,
        )
    assert measure_in("one").outcomes == first.outcomes


def test_a_folder_holds_neighbours_of_one_kind(measure_in: MeasureIn) -> None:
    measure_in("out")
    with pytest.raises(InvalidValueError, match="neighbours: overlap there, random now"):
        measure_in("out", "random")


@pytest.mark.parametrize("source", ["embedding", "shared"])
def test_the_embedder_is_a_source_too(
    measure_in: MeasureIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    from chunkcache_retriever.testing import FixedEmbedder

    monkeypatch.setattr("chunkcache_retriever.minilm.MiniLmEmbedder", FixedEmbedder)
    measure_in("out", source)
    assert set(_neighbours(tmp_path / "out" / "store")) == {"p0", "p1", "p2"}


def test_an_unknown_source_names_those_there_are() -> None:
    with pytest.raises(InvalidValueError, match="embedding, shared, overlap, random"):
        neighbour_source("friends")


def test_the_command_passes_the_choice_on(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from chunkcache_eval.cli import app

    monkeypatch.setenv("CHUNKCACHE_CACHE_DIR", str(settings.cache_dir))

    def run(*args: str) -> Any:
        fixed = ["--model", settings.model, "--out", str(tmp_path / "out"), "--json"]
        fixed += ["--limit", "1", "--answer-tokens", "1", "--f1-tokens", "1", "--policy", "none"]
        fixed += ["--preparation", PREPARATION]
        return CliRunner().invoke(app, ["eval", "quality", *fixed, *args])

    result = run("--neighbours", "friends")
    assert result.exit_code == 1
    assert "known: embedding, shared, overlap, random" in result.stdout
    result = run("--neighbours", "overlap")
    assert result.exit_code == 0, result.output
    assert '"ingest_cost"' in result.stdout
    command = (tmp_path / "out" / "commands.txt").read_text(encoding="utf-8")
    assert "--neighbours overlap" in command
