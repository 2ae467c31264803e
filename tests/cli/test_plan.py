"""``chunkcache plan``: what a corpus will take, told before and true afterwards."""

import shutil
from pathlib import Path

import pytest


def test_what_was_planned_is_what_is_stored(cli, cli_json, write_documents) -> None:
    folder = write_documents(6)
    planned = cli_json("plan", folder)
    stored = cli_json("precache", folder)
    assert planned["corpus"] == {
        "num_documents": 6,
        "num_chunks": stored["chunks"],
        "num_tokens": stored["tokens"],
        "num_unreadable": 0,
    }
    by_codec = {row["codec"]: row for row in planned["codecs"]}
    assert by_codec["raw32"]["bytes_per_token"] == 2 * by_codec["bf16"]["bytes_per_token"]
    entry_bytes = cli_json("stats")["bytes"]["disk"]
    assert by_codec["bf16"]["disk_bytes"] == pytest.approx(entry_bytes, rel=0.25)
    assert planned["prefill_s"] is None
    assert all(row["load_speedup"] is None for row in planned["codecs"])


def test_no_weights_are_needed(cli_json, model_dir, tmp_path: Path) -> None:
    outline = tmp_path / "outline"
    source = model_dir(max_position_embeddings=32_768)
    shutil.copytree(source, outline, ignore=shutil.ignore_patterns("*.safetensors"))
    planned = cli_json("plan", "--tokens", "100000", "--model", outline, "--prefill-speed", "500")
    assert planned["corpus"]["num_tokens"] == 100_000
    assert planned["prefill_s"] == pytest.approx(200)
    for row in planned["codecs"]:
        assert row["disk_bytes"] >= 100_000 * row["bytes_per_token"]
        speed = row["break_even_prefill_tokens_per_s"]
        assert row["load_speedup"] == pytest.approx(speed / 500)
        assert row["load_ms_per_1k_tokens"] == pytest.approx(1e6 / speed)


def test_the_table_says_the_same(cli) -> None:
    result = cli("plan", "--tokens", "5000", "--measure")
    assert result.exit_code == 0
    assert "5,000 tokens" in result.stdout
    assert "bf16" in result.stdout
    assert "tokens/s" in result.stdout


@pytest.mark.parametrize(
    "args", [(), ("docs", "--tokens", "5"), ("--tokens", "5", "--measure", "--prefill-speed", "1")]
)
def test_wrong_usage_is_refused(cli, args) -> None:
    assert cli("plan", *args).exit_code == 2


def test_an_empty_corpus_is_an_error(cli_json, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    body = cli_json("plan", tmp_path / "empty", exit_code=1)
    assert body["error"]["code"] == "invalid_value"
