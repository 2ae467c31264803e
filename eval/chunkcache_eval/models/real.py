"""Real models: are the greedy answers of a full prefill the library's own?"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from chunkcache.chunk_cache import ChunkCache
from chunkcache.planning import AskOptions
from chunkcache.settings import Settings

QUESTIONS = (
    "When does the harbour open?",
    "Who keeps the key?",
    "What is the door code?",
    "When was the bridge built?",
    "Where are tickets sold?",
)
NUM_PASSAGES = (1, 2, 3, 12)
"""The longest prompts are longer than a window of 512 tokens."""
ANSWER_TOKENS = 16

_PASSAGES = (
    "The harbour opens at seven in the morning. The ferry to the island leaves from the northern "
    "pier at nine and comes back at five. Tickets are sold in the hut beside the crane.",
    "The key to the tower is kept by the baker. The door code is 4017, and the light goes on at "
    "dusk. Visitors may climb the stairs on Sundays only, and not when the wind is strong.",
    "The bridge was built in 1902 over the river Alm. It carries two tracks and a path. In winter "
    "the path is closed when ice covers the planks, and the guard walks along the rails.",
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RealResult:
    """One real model.

    Attributes:
        model: As it was named.
        family: Its family.
        num_prompts: Prompts compared.
        num_equal: Those with the library's answer, token for token.
        longest_prompt_tokens: The longest of them.
        gate_passed: Whether it passed its gate.
    """

    model: str
    family: str
    num_prompts: int
    num_equal: int
    longest_prompt_tokens: int
    gate_passed: bool

    @property
    def passed(self) -> bool:
        """Whether every answer was the library's."""
        return self.gate_passed and self.num_equal == self.num_prompts


def measure_real(
    settings: Settings, progress: Progress = lambda line: None, *, num_prompts: int = 20
) -> RealResult:
    """Answer in full, and have the library generate behind the same ids.

    Args:
        settings: The model, with its device and dtype; the store is replaced.
        progress: Told of each prompt.
        num_prompts: How many of the twenty, four of each question.

    Raises:
        ModelError: The model cannot be loaded or is refused.
    """
    prompts = [(q, n) for q in QUESTIONS for n in NUM_PASSAGES][:num_prompts]
    num_equal = longest = 0
    with tempfile.TemporaryDirectory(prefix="chunkcache-eval-") as folder:
        values = settings.model_dump() | {"store": Path(folder) / "store", "chunk_tokens": 64}
        with ChunkCache.open(progress=progress, **values) as cache:
            for i in range(max(NUM_PASSAGES)):
                cache.put(f"doc-{i}", f"Note {i}. {_PASSAGES[i % len(_PASSAGES)]}")
            for number, (question, num_passages) in enumerate(prompts, 1):
                progress(f"{settings.model}: prompt {number} of {len(prompts)}")
                documents = [f"doc-{i}" for i in range(num_passages)]
                options = AskOptions(policy="full", max_tokens=ANSWER_TOKENS)
                stream = cache.stream(question, documents, options)
                answer = stream.answer()
                prompt = stream.plan.layout.token_ids
                num_equal += answer.token_ids == _library_answer(cache, prompt)
                longest = max(longest, len(prompt))
            runtime = cache.runtime
            return RealResult(
                model=settings.model,
                family=runtime.model.runner.spec.family.name,
                num_prompts=len(prompts),
                num_equal=num_equal,
                longest_prompt_tokens=longest,
                gate_passed=runtime.gate.passed,
            )


def _library_answer(cache: ChunkCache, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The library's greedy answer, without what ends it; run on the engine's thread."""
    runner = cache.runtime.model.runner
    eos = sorted(runner.eos_token_ids)
    ids = torch.tensor([prompt], device=runner.device)

    def generate() -> list[int]:
        found = runner.hf_model.generate(
            ids,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=eos,
            attention_mask=torch.ones_like(ids),
        )
        return found[0, len(prompt) :].tolist()

    return tuple(t for t in cache.runtime.engine.call(generate).result() if t not in eos)
