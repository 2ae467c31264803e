"""``chunkcache config show``: values, where they come from, what they mean."""

from pathlib import Path

import pytest

from chunkcache.settings import Settings


def by_name(body: dict) -> dict[str, dict]:
    return {setting["name"]: setting for setting in body["settings"]}


def test_every_setting_says_where_it_comes_from(cli_json, tmp_path: Path, settings_env) -> None:
    file = tmp_path / "chunkcache.toml"
    file.write_text('policy = "none"\nchunk_tokens = 64\ncodec = "raw"\n')
    settings_env.setenv("CHUNKCACHE_CONFIG", str(file))
    settings_env.setenv("CHUNKCACHE_CODEC", "bf16")
    found = by_name(cli_json("config", "show", "--chunk-tokens", "128"))
    assert list(found) == list(Settings.model_fields)
    assert {n: (found[n]["value"], found[n]["source"]) for n in found if n in WANTED} == WANTED
    assert found["store"]["source"] == "env"
    assert found["chunk_tokens"]["default"] == 256
    assert all(setting["meaning"] for setting in found.values())


WANTED = {
    "policy": ("none", "file"),
    "chunk_tokens": (128, "flag"),
    "codec": ("bf16", "env"),
    "device": ("cpu", "default"),
}


def test_the_table_explains_when_asked(cli, settings_env) -> None:
    settings_env.setenv("COLUMNS", "160")
    plain, explained = cli("config", "show"), cli("config", "show", "--explain")
    assert plain.exit_code == explained.exit_code == 0
    assert "recompute_ratio" in plain.stdout
    assert "Torch device" not in plain.stdout
    assert "Torch device" in explained.stdout


@pytest.mark.parametrize("content", ["polic = 1", "policy = ", 'chunk_tokens = "many"', None])
def test_a_file_that_does_not_fit_is_refused(
    cli_json, tmp_path: Path, settings_env, content: str | None
) -> None:
    file = tmp_path / "chunkcache.toml"
    if content is not None:
        file.write_text(content)
    settings_env.setenv("CHUNKCACHE_CONFIG", str(file))
    body = cli_json("config", "show", exit_code=1)
    assert body["error"]["code"] == "invalid_value"
    assert body["error"]["message"]
