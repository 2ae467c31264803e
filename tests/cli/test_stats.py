"""``chunkcache stats``: what a store holds, without a model."""

from pathlib import Path


def test_figures_are_those_of_the_store(
    cli, cli_json, write_documents, store: Path, model_dir
) -> None:
    summary = cli_json("precache", write_documents(4))
    stats = cli_json("stats", "--store", store)
    assert stats["store"] == str(store.resolve())
    assert (stats["documents"], stats["chunks"]) == (4, 4)
    assert stats["tokens"] == summary["tokens"]
    assert stats["entries"] == {"disk": 4}
    assert 0 < stats["bytes"]["disk"] < stats["file_bytes"] <= stats["max_bytes"]
    assert stats["quarantined"] == 0
    (gate,) = stats["gate_reports"]
    assert gate["passed"] is True
    assert gate["model_name"] == model_dir(max_position_embeddings=32_768).name

    result = cli("stats")
    assert result.exit_code == 0
    assert "4 in 4 chunks" in result.stdout
    assert "4 on disk" in result.stdout
    assert "passed" in result.stdout
    assert result.stderr == ""


def test_no_store_is_an_error_and_makes_none(cli_json, store: Path) -> None:
    body = cli_json("stats", exit_code=1)
    assert body["error"]["code"] == "store_error"
    assert not store.exists()
