"""``chunkcache keys``: made, shown once, listed, revoked; nothing but hashes in the file."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chunkcache_api.auth.api_key import make_key
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.auth.keys_file import change_keys, read_keys
from chunkcache_api.errors import InvalidApiKeyError, KeysFileError


def test_a_key_is_made_listed_and_revoked(cli_json, cli, store: Path) -> None:
    made = cli_json("keys", "create", "--tenant", "acme", "--scope", "query", "--name", "ci")
    path = store / "keys.json"
    assert made["keys_file"] == str(path)
    assert made["scopes"] == ["query"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made["key"] not in path.read_text()
    assert made["key"].partition(made["id"])[2] not in path.read_text()
    key = KeyRing(path).identify(made["key"])
    assert (key.tenant, key.scopes) == ("acme", frozenset({"query"}))

    other = cli("keys", "create", "--tenant", "b", "--scope", "ingest", "--scope", "admin")
    assert other.exit_code == 0
    assert KeyRing(path).identify(other.stdout.strip()).tenant == "b"
    listed = cli_json("keys", "list")["keys"]
    assert [(k["tenant"], k["name"], k["expires_at"]) for k in listed] == [
        ("acme", "ci", None),
        ("b", None, None),
    ]
    assert "admin, ingest" in cli("keys", "list").stdout
    assert cli_json("keys", "revoke", made["id"]) == {"id": made["id"], "revoked": True}
    with pytest.raises(InvalidApiKeyError):
        KeyRing(path).identify(made["key"])
    gone = cli_json("keys", "revoke", made["id"], exit_code=1)
    assert gone["error"]["code"] == "invalid_value"


def test_the_file_may_be_elsewhere(cli_json, tmp_path: Path, store: Path) -> None:
    path = tmp_path / "etc" / "team-keys.json"
    cli_json("keys", "create", "--tenant", "a", "--scope", "query", "--keys-file", path)
    assert len(cli_json("keys", "list", "--keys-file", path)["keys"]) == 1
    assert cli_json("keys", "list")["keys"] == []
    assert not store.exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--tenant", "a", "--scope", "everything"),
        ("--tenant", "", "--scope", "query"),
        ("--tenant", "a\nb", "--scope", "query"),
        ("--tenant", "a", "--scope", "query", "--days", "-1"),
        ("--tenant", "a", "--scope", "query", "--name", "x" * 200),
    ],
)
def test_what_is_not_acceptable_makes_no_file(cli_json, options, store: Path) -> None:
    body = cli_json("keys", "create", *options, exit_code=1)
    assert body["error"]["code"] == "invalid_value"
    assert not store.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 9, "keys": []}'])
def test_a_damaged_file_is_left_as_it_is(cli_json, store: Path, content: str) -> None:
    store.mkdir()
    path = store / "keys.json"
    path.write_text(content)
    for command in (("create", "--tenant", "a", "--scope", "query"), ("list",), ("revoke", "x")):
        body = cli_json("keys", *command, exit_code=1)
        assert body["error"]["code"] == "keys_file"
    assert path.read_text() == content
    body = cli_json("serve", "--port", "0", exit_code=1)
    assert body["error"]["code"] == "keys_file"


def test_revoking_without_a_file_makes_none(cli_json, store: Path) -> None:
    assert cli_json("keys", "revoke", "x", exit_code=1)["error"]["code"] == "keys_file"
    assert not store.exists()


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def make(number: int) -> str:
        _, key = make_key(f"tenant-{number}", frozenset({"query"}))
        change_keys(path, lambda keys: keys.update({key.key_id: key}))
        return key.key_id

    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(make, range(24)))
    assert set(read_keys(path)) == made
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _, key = make_key("t", frozenset({"query"}))
    change_keys(path, lambda keys: keys.update({key.key_id: key}))
    before = path.read_bytes()

    def fail(keys: dict) -> None:
        keys.clear()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_keys(path, fail)
    assert path.read_bytes() == before


@pytest.mark.parametrize("digest", ["", "ab", "zz" * 32])
def test_a_hash_that_is_none_is_refused(tmp_path: Path, digest: str) -> None:
    path = tmp_path / "keys.json"
    _, key = make_key("t", frozenset({"query"}))
    change_keys(path, lambda keys: keys.update({key.key_id: key}))
    value = json.loads(path.read_text())
    value["keys"][0]["digest"] = digest
    path.write_text(json.dumps(value))
    with pytest.raises(KeysFileError):
        read_keys(path)
