"""``chunkcache doctor``: what it finds, what it calls a problem, and the code it ends with."""

import importlib.metadata
import os
from pathlib import Path
from typing import get_args

import pytest

from chunkcache.fusion.place import place_entry
from chunkcache.probing import Closeness
from chunkcache.settings import load_settings
from chunkcache.store import environment
from chunkcache_api.cli.diagnosis import VERDICTS, changed_settings


def test_a_healthy_set_up(
    cli, cli_json, write_documents, store: Path, settings_env: pytest.MonkeyPatch
) -> None:
    settings_env.setenv("CHUNKCACHE_CHUNK_TOKENS", "512")
    cli("precache", write_documents(3))
    body = cli_json("doctor", "--policy", "full")
    assert body["ok"] is True
    assert body["problems"] == []
    machine = body["machine"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert 0 < machine["ram_available_bytes"] <= machine["ram_bytes"]
    assert machine["torch"] == importlib.metadata.version("torch")
    assert machine["device"] == "cpu"
    found = body["store"]
    assert found["path"] == str(store.resolve())
    assert (found["documents"], found["entries"]) == (3, 3)
    assert 0 < found["entry_bytes"] < found["file_bytes"]
    assert 0 < found["room_bytes"] < found["max_bytes"]
    model = body["model"]
    assert model["family"] == "Llama"
    assert model["dtype"] == "float32"
    assert model["max_positions"] == 32_768
    assert model["gate"]["passed"] is True
    assert len(model["digest"]) == 64
    fidelity = body["fidelity"]
    assert (fidelity["policy"], fidelity["closeness"]) == ("full", "exact")
    assert (fidelity["agreement"], fidelity["measured"]) == (1.0, "now")
    assert fidelity["verdict"] == VERDICTS["exact"]
    assert body["settings"]["chunk_tokens"] == {"value": 512, "default": 256}
    assert body["settings"]["policy"] == {"value": "full", "default": "hybrid"}
    assert "codec" not in body["settings"]

    result = cli("doctor", "--policy", "full")
    assert result.exit_code == 0
    for shown in ("cores", "3 documents", "Llama", "gate", VERDICTS["exact"], "chunk_tokens = 512"):
        assert shown in result.stdout
    assert "measured earlier" in result.stdout
    assert result.stderr.splitlines()[-1] == "all is well"
    assert "fidelity probe" not in result.stderr, "it was measured before"
    again = cli("doctor", "--policy", "full", "--fidelity", "again")
    assert "fidelity probe 5 of 5" in again.stderr
    assert cli_json("stats")["documents"] == 3


def test_an_untrained_model_s_fused_answers_are_judged(cli_json) -> None:
    body = cli_json("doctor", "--policy", "none", "--preparation", "alone", "--chunk-tokens", "512")
    fidelity = body["fidelity"]
    assert fidelity["mean_kl"] > 0
    assert fidelity["verdict"] == VERDICTS[fidelity["closeness"]]
    assert fidelity["num_questions"] == 5
    assert fidelity["preparation"] == "alone"


def test_skipping_measures_nothing(cli, cli_json) -> None:
    assert cli_json("doctor", "--fidelity", "skip")["fidelity"] is None
    result = cli("doctor", "--fidelity", "skip")
    assert "not measured" in result.stdout
    assert result.exit_code == 0


def test_every_closeness_has_a_verdict() -> None:
    assert set(VERDICTS) == set(get_args(Closeness))


def test_a_model_that_cannot_be_loaded_is_a_problem_and_the_rest_is_told(
    cli, cli_json, write_documents, tmp_path: Path
) -> None:
    cli("precache", write_documents(2))
    missing = tmp_path / "no-model"
    body = cli_json("doctor", "--model", missing, exit_code=1)
    assert body["ok"] is False
    assert [p["code"] for p in body["problems"]] == ["model_files"]
    assert body["store"]["documents"] == 2
    assert body["model"] is None
    result = cli("doctor", "--model", missing)
    assert result.exit_code == 1
    assert "not examined" in result.stdout
    assert result.stderr.splitlines()[-1].endswith("(model_files)")


def test_a_store_that_cannot_be_opened_is_a_problem(cli_json, store: Path) -> None:
    store.write_text("a file stands where the directory should be")
    body = cli_json("doctor", exit_code=1)
    assert [p["code"] for p in body["problems"]] == ["store_error"]
    assert (body["store"], body["model"]) == (None, None)
    assert body["machine"]["cores"] > 0


def test_a_model_without_room_for_the_probe_is_a_problem(cli_json, model_dir) -> None:
    body = cli_json("doctor", "--model", model_dir(), "--preparation", "alone", exit_code=1)
    (problem,) = body["problems"]
    assert problem["code"] == "context_length_exceeded"
    assert "fidelity" in problem["message"]
    assert body["model"]["gate"]["passed"] is True


def test_a_model_that_is_served_in_full_alone_is_a_problem(
    cli, cli_json, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(sequence, entry, start: int) -> None:
        place_entry(sequence, entry, start)
        sequence.k_pages.neg_()

    monkeypatch.setattr("chunkcache.model.gate.place_entry", backwards)
    body = cli_json("doctor", "--fidelity", "skip", exit_code=1)
    assert [p["code"] for p in body["problems"]] == ["model_full_only"]
    assert body["model"]["gate"]["full_only"] is True
    assert "full prefills alone" in cli("doctor", "--fidelity", "skip").stdout


def test_a_store_that_is_nearly_full_is_a_problem(
    cli_json, settings_env: pytest.MonkeyPatch
) -> None:
    settings_env.setenv("CHUNKCACHE_STORE_MAX_BYTES", str(32 << 20))
    body = cli_json("doctor", "--fidelity", "skip", exit_code=1)
    assert [p["code"] for p in body["problems"]] == ["store_nearly_full"]
    assert 0 < body["store"]["room_bytes"] < 32 << 20


def test_a_network_filesystem_is_a_problem(cli_json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "network_filesystem", lambda path: "nfs4")
    body = cli_json("doctor", "--fidelity", "skip", exit_code=1)
    assert [p["code"] for p in body["problems"]] == ["network_filesystem"]
    assert body["store"]["network_filesystem"] == "nfs4"


def test_a_bad_setting_is_an_error(cli_json) -> None:
    assert cli_json("doctor", "--codec", "zip", exit_code=1)["error"]["code"] == "invalid_value"
    body = cli_json("doctor", "--policy", "magic", exit_code=1)
    assert [p["code"] for p in body["problems"]] == ["invalid_value"]


def test_settings_at_their_defaults_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("CHUNKCACHE_")]:
        monkeypatch.delenv(name)
    assert changed_settings(load_settings()) == {}
    changed = changed_settings(load_settings(verify_rate=0.5, store="elsewhere"))
    assert changed == {
        "store": {"value": "elsewhere", "default": "chunkcache.store"},
        "verify_rate": {"value": 0.5, "default": 0.0},
    }


def test_a_remote_that_does_not_answer_is_a_problem_without_its_password(cli) -> None:
    result = cli("doctor", "--fidelity", "skip", "--remote", "redis://u:hunter2@127.0.0.1:9/0")
    assert result.exit_code == 1
    assert "(remote_unreachable)" in result.stderr
    assert "redis://***@127.0.0.1:9/0 does not answer" in " ".join(result.stdout.split())
    assert "hunter2" not in result.stdout + result.stderr
