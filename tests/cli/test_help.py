"""Help texts teach by example, every example is one, and none of this loads a model's library."""

import importlib.metadata
import json
import shlex
import subprocess
import sys

import pytest
import typer.main

from chunkcache_api.cli.app import app

GROUPS = {
    "models": ("check", "convert"),
    "store": ("verify", "gc", "backup", "export", "import"),
    "keys": ("create", "list", "revoke"),
    "config": ("show",),
}
COMMANDS = (
    "demo",
    "precache",
    "ask",
    "serve",
    "mcp",
    "stats",
    *GROUPS,
    "doctor",
    "plan",
    "version",
)
LEAVES = (
    *(c for c in COMMANDS if c not in GROUPS),
    *(f"{group} {leaf}" for group, leaves in GROUPS.items() for leaf in leaves),
)
HEAVY = ("torch", "transformers", "sentence_transformers", "fastapi", "faiss", "chunkcache")


def examples(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith("chunkcache ")]


def test_the_first_help_names_every_command(cli) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.stdout


@pytest.mark.parametrize("command", LEAVES)
def test_help_teaches_by_examples_that_parse(cli, command: str) -> None:
    words = command.split()
    result = cli(*words, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    found = examples(result.stdout)
    assert found
    leaf = typer.main.get_command(app)
    for word in words:
        leaf = leaf.commands[word]  # type: ignore[attr-defined]
    for example in found:
        typed = shlex.split(example.split(" > ")[0].split(" | ")[0])
        if typed[1 : len(words) + 1] == words:
            leaf.make_context(command, typed[len(words) + 1 :])
    assert any(shlex.split(example)[1 : len(words) + 1] == words for example in found)


def test_help_and_version_load_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from chunkcache_api.cli.app import app\n"
        "for args in (['--help'], ['ask', '--help'], ['version', '--json']):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    path = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "[]\n"


def test_version_names_the_libraries_that_results_depend_on(cli, cli_json) -> None:
    body = cli_json("version")
    assert body["version"] == importlib.metadata.version("chunkcache")
    assert body["libraries"]["torch"] == importlib.metadata.version("torch")
    assert json.dumps(body["version"]).strip('"') in cli("version").stdout
