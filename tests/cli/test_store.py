"""``chunkcache store``: what its commands print, and the codes they end with."""

import os
from pathlib import Path

import pytest

from chunkcache.catalog import Catalog
from chunkcache.catalog_records import info_key, text_key
from chunkcache.chunk_cache import DEFAULT_TENANT
from chunkcache.identity import tenant_namespace
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database

NUM_DOCUMENTS = 3


@pytest.fixture
def filled(cli_json, write_documents, store: Path) -> Path:
    cli_json("precache", write_documents(NUM_DOCUMENTS))
    return store


def change(store: Path, database: Database, key, new) -> None:
    """Change a stored value; ``key`` gets the tenant's namespace."""
    with StoreEnvironment.open(store, max_bytes=1 << 30) as env:
        name = key(tenant_namespace(env.secret, DEFAULT_TENANT), env)

        def body(txn) -> None:
            value = new(bytes(txn.get(database, name) or b""))
            if value is None:
                txn.delete(database, name)
            else:
                txn.put(database, name, value)

        env.update(body)


def flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def first_entry(namespace: bytes, env: StoreEnvironment) -> bytes:
    with env.read() as txn:
        return next(key for key, _ in txn.scan(Database.ENTRIES))


def test_a_sound_store(filled, cli, cli_json) -> None:
    body = cli_json("store", "verify")
    assert body["sound"] is True
    assert body["findings"] == []
    assert body["checked"]["documents"] == NUM_DOCUMENTS
    result = cli("store", "verify")
    assert result.exit_code == 0
    assert "sound" in result.stderr
    assert "3 in 3 chunks" in result.stdout


def test_a_damaged_entry_is_found_mended_and_computed_again(filled, cli_json, cli) -> None:
    change(filled, Database.ENTRIES, first_entry, flip)
    body = cli_json("store", "verify", exit_code=3)
    assert (body["sound"], body["damaged"]) == (False, 1)
    assert body["findings"][0]["fault"] == "damaged_entry"
    assert "checksum" in body["findings"][0]["detail"]
    assert "--repair" in cli("store", "verify").stderr
    body = cli_json("store", "verify", "--repair")
    assert (body["sound"], body["repaired"], body["damaged"]) == (True, True, 1)
    assert cli_json("store", "verify")["findings"] == []
    summary = cli_json("precache", filled.parent / "docs")
    assert summary["prefilled_chunks"] == 1


def test_a_damaged_document_is_named(filled, cli_json, cli) -> None:
    change(filled, Database.DOCUMENTS, lambda ns, _: text_key(ns, "001.txt"), flip)
    change(filled, Database.DOCUMENTS, lambda ns, _: info_key(ns, "002.txt"), flip)
    result = cli("store", "verify")
    assert result.exit_code == 3
    assert "damaged_document: 001.txt" in result.stderr
    assert "damaged_document: 002.txt" in result.stderr
    asked = cli("ask", "Which?", "--doc", "002.txt")
    assert asked.exit_code == 1
    assert "document '002.txt' is damaged" in asked.stderr
    cli_json("store", "verify", "--repair")
    assert cli_json("stats")["documents"] == NUM_DOCUMENTS - 1
    assert cli_json("precache", filled.parent / "docs")["created"] == 1


def test_gc_tells_removes_and_gives_space_back(filled, cli, cli_json) -> None:
    with StoreEnvironment.open(filled, max_bytes=1 << 30) as env:
        namespace = tenant_namespace(env.secret, DEFAULT_TENANT)
        with env.read() as txn:
            num_entries = txn.num_entries(Database.ENTRIES)
        catalog = Catalog(env, namespace, clock=lambda: 0.0)
        from dataclasses import replace

        catalog.put(replace(catalog.require("001.txt"), expires_at=1.0), now=0.0)
    told = cli_json("store", "gc", "--dry-run")
    assert (told["dry_run"], told["expired_documents"], told["entries"]) == (True, 1, 1)
    assert cli_json("store", "gc") == told | {
        "dry_run": False,
        "live_bytes": told["live_bytes"] - told["freed_bytes"],
    }
    assert told["freed_bytes"] > 0
    assert cli_json("store", "gc")["entries"] == 0
    (model,) = told["models"]
    result = cli("store", "gc", "--drop-model", model["model"][:12])
    assert result.exit_code == 0
    assert f"{num_entries - 1} entries" in result.stdout
    assert model["model"] in result.stderr
    assert cli_json("stats")["entries"]["disk"] == 0
    assert cli_json("precache", filled.parent / "docs")["prefilled_chunks"] == NUM_DOCUMENTS


def test_gc_refuses_a_digest_of_no_model(filled, cli_json) -> None:
    body = cli_json("store", "gc", "--drop-model", "0123456789", exit_code=1)
    assert body["error"]["code"] == "invalid_value"


def test_a_backup_answers_as_the_store_does(filled, cli, cli_json, tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "monday"
    body = cli_json("store", "backup", copy)
    assert (body["sound"], body["checked"]["documents"]) == (True, NUM_DOCUMENTS)
    assert body["file_bytes"] == (copy / "data.mdb").stat().st_size
    body = cli_json("store", "backup", copy, exit_code=1)
    assert body["error"]["code"] == "store_error"
    question = ("ask", "Which code?", "--doc", "001.txt", "--max-tokens", "2")
    answers = [cli_json(*question), cli_json(*question, "--store", copy, "--read-only")]
    assert answers[0]["answer"] == answers[1]["answer"]
    sources = [a["chunkcache"]["documents"][0]["source"] for a in answers]
    assert sources == ["disk", "disk"]
    assert "copied" not in cli("store", "verify", "--store", copy).stderr
    assert os.listdir(copy.parent) == ["monday"]


def test_a_pack_spares_the_other_store_the_prefill(filled, cli, cli_json, tmp_path: Path) -> None:
    pack, other = tmp_path / "docs.pack", tmp_path / "other"
    body = cli_json("store", "export", pack)
    assert body["manifest"]["documents"] == NUM_DOCUMENTS
    assert body["num_bytes"] == sum(p.stat().st_size for p in pack.iterdir())
    report = cli_json("store", "import", pack, "--store", other)
    assert (report["created"], report["entries"]) == (NUM_DOCUMENTS, body["manifest"]["entries"])
    summary = cli_json("precache", filled.parent / "docs", "--store", other)
    assert (summary["unchanged"], summary["prefilled_chunks"]) == (NUM_DOCUMENTS, 0)
    again = cli("store", "import", pack, "--store", other)
    assert again.exit_code == 0
    assert "3 unchanged" in again.stdout


def test_a_pack_of_another_model_and_no_pack(filled, cli, cli_json, model_dir, tmp_path) -> None:
    pack = tmp_path / "docs.pack"
    assert cli("store", "export", pack).exit_code == 0
    model = model_dir(seed=3, max_position_embeddings=32_768)
    other = ("--store", tmp_path / "other", "--model", model)
    body = cli_json("store", "import", pack, *other, exit_code=1)
    assert body["error"]["code"] == "pack_foreign"
    body = cli_json("store", "import", filled, exit_code=1)
    assert body["error"]["code"] == "pack_invalid"
    body = cli_json("store", "export", pack, exit_code=1)
    assert body["error"]["code"] == "store_error"


def test_an_export_that_leaves_something_out_says_so(filled, cli, cli_json, tmp_path) -> None:
    change(filled, Database.ENTRIES, first_entry, flip)
    body = cli_json("store", "export", tmp_path / "docs.pack", exit_code=3)
    assert (body["damaged_entries"], body["manifest"]["documents"]) == (1, NUM_DOCUMENTS)
    assert "left out: 1 damaged" in cli("store", "export", tmp_path / "again.pack").stderr


@pytest.mark.parametrize("command", [("verify",), ("gc",), ("backup", "copy"), ("export", "pack")])
def test_no_command_makes_a_store(cli_json, store: Path, command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = cli_json("store", *command, exit_code=1)
    assert body["error"]["code"] == "store_error"
    assert os.listdir(tmp_path) == []


def test_a_truncated_file_is_one_line(filled, cli) -> None:
    data = filled / "data.mdb"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    for command in ("verify", "gc"):
        result = cli("store", command)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert "(store_format)" in result.stderr
    (filled / "data.mdb").write_bytes(b"no store at all\n" * 1_000)
    result = cli("store", "verify")
    assert result.exit_code == 1
    assert "(store_format)" in result.stderr
