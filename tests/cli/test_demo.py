"""``chunkcache demo``, with a tiny model: its answers mean nothing, its figures add up."""

from pathlib import Path

import pytest

from chunkcache_api.cli.demo_data import demo_items, demo_questions


def test_the_handbook_answers_its_questions() -> None:
    texts = {sized.item.document_id: sized.item.text for sized in demo_items()}
    assert len(texts) == 12
    assert all(sized.num_bytes > 1_000 for sized in demo_items())
    questions = demo_questions()
    assert len(questions) >= 3
    for question in questions:
        assert set(question.document_ids) <= set(texts)
        assert any(question.gold in texts[d] for d in question.document_ids)


def test_a_second_run_prefills_nothing(
    cli, cli_json, settings_env: pytest.MonkeyPatch, tmp_path: Path, store: Path
) -> None:
    settings_env.setenv("CHUNKCACHE_CACHE_DIR", str(tmp_path / "cache"))
    body = cli_json("demo", "--questions", "1", "--preparation", "alone")
    assert body["prefilled_chunks"] > 12
    assert body["preparation"] == "alone"
    assert body["policy"].startswith("hybrid(")
    (question,) = body["questions"]
    assert question["question"] == demo_questions()[0].question
    assert question["document_ids"] == list(demo_questions()[0].document_ids)
    assert question["gold"] == "Linnet"
    assert question["speedup"] == body["speedup_median"] > 0
    assert question["speedup"] == pytest.approx(
        question["full_ttft_ms"] / question["fused_ttft_ms"], rel=1e-3
    )
    assert set(question["tokens_by_source"]) == {
        "device",
        "host",
        "disk",
        "remote",
        "recomputed",
        "computed",
    }
    assert question["tokens_by_source"]["host"] > 0
    assert question["kl_first"] >= 0
    assert question["mean_kl"] >= 0
    assert 0 <= question["agreement"] <= 1
    assert question["agree"] == (question["fused_answer"] == question["full_answer"])
    assert question["fused_answer"]
    assert question["full_answer"]

    result = cli("demo", "--questions", "1", "--preparation", "alone")
    assert result.exit_code == 0
    assert "prefilled  0 chunks" in result.stderr
    assert "warm-up" in result.stderr
    assert "expected: Linnet" in result.stdout
    assert "full prefill" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Median speed-up")
    # The demo has a store of its own; the user's is left alone.
    assert (tmp_path / "cache" / "demo.store").is_dir()
    assert not store.exists()
