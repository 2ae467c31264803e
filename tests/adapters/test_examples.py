"""The examples of the documentation run as they stand, over a tiny model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
EXAMPLES = re.findall(r"^## (\w+)$.*?^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
MODULES = {
    "LangChain": "langchain_core",
    "LlamaIndex": "llama_index.core",
    "Haystack": "haystack",
}


def test_every_framework_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == set(MODULES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*beta.*")
@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_runs(
    name: str,
    code: str,
    model_dir: Callable[..., Path],
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(MODULES[name])
    monkeypatch.chdir(tmp_path)
    settings = {
        "MODEL": model_dir(),
        "CACHE_DIR": cache_dir,
        "STORE_MAX_BYTES": 1 << 30,
        "POOL_TOKENS": 4096,
        "PREPARATION": "alone",
        "CHUNK_TOKENS": 24,
    }
    for key, value in settings.items():
        monkeypatch.setenv(f"CHUNKCACHE_{key}", str(value))
    if name == "LlamaIndex":
        from llama_index.core import Settings

        monkeypatch.setattr(Settings, "_tokenizer", str.split)  # its own would be downloaded
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()
    assert (tmp_path / "my.store").is_dir()
