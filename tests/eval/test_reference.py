"""The full prefill's answers: kept once for a folder, and what arms are measured against."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache.engine.request import GenerationJob
from chunkcache.engine.sampling import SamplingParams
from chunkcache.fusion.fidelity import kl_divergence, mean_kl
from chunkcache.planning import AskOptions
from chunkcache_eval.datasets.records import Passage, Question
from chunkcache_eval.quality.arms import arms_for
from chunkcache_eval.quality.measure import AnswerLengths, QuestionMeter, document_id_of
from chunkcache_eval.quality.reference import Reference, ReferenceShelf

PROMPT = (5, 6, 7)


def _reference(**changed: Any) -> Reference:
    fields: dict[str, Any] = {
        "text": "the baker “of the” tower",
        "token_ids": (1, 2, 3, 4),
        "logits": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
        "prompt_tokens": 41,
        "charged_ratio": 1.25,
        "ttft_ms": 0.1 + 0.2,
    }
    return Reference(**(fields | changed))


def test_a_reference_comes_back_as_it_was(tmp_path: Path) -> None:
    shelf = ReferenceShelf(tmp_path / "references")
    assert shelf.get(PROMPT) is None
    given = _reference()
    shelf.put(PROMPT, given)
    found = ReferenceShelf(tmp_path / "references").get(PROMPT)
    assert found is not None
    assert torch.equal(found.logits, given.logits)
    for name in ("text", "token_ids", "prompt_tokens", "charged_ratio", "ttft_ms"):
        assert getattr(found, name) == getattr(given, name)
    assert shelf.get((5, 67)) is None, "another prompt"


def test_a_damaged_reference_is_none(tmp_path: Path) -> None:
    shelf = ReferenceShelf(tmp_path)
    shelf.put(PROMPT, _reference())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert shelf.get(PROMPT) is None
    shelf.put(PROMPT, _reference(text="again"))
    assert (found := shelf.get(PROMPT)) is not None
    assert found.text == "again"


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "forced"),
    [(5, 3, (0, 1)), (2, 3, (0, 1)), (0, 1, ())],
    ids=["longer than what is compared", "ended by the end token", "empty"],
)
def test_the_end_token_s_distribution_stands_behind_the_last_forced_one(
    num_tokens: int, num_logits: int, forced: tuple[int, ...]
) -> None:
    reference = _reference(token_ids=tuple(range(num_tokens)), logits=torch.zeros(num_logits, 4))
    assert reference.forced_ids == forced


@pytest.mark.parametrize("policy", ["none", "hybrid", "deviation"])
def test_distributions_are_those_behind_the_full_answer(
    open_cache: Callable[..., Any], passages: dict[str, str], tmp_path: Path, policy: str
) -> None:
    """Whether an arm's own answer is the full prefill's or not.

    1. What the meter gives. 2. A pass in which the full prefill's answer rides along.
    """
    cache = open_cache(codec="raw")
    found = tuple(Passage(name, text) for name, text in passages.items())
    for passage in found:
        cache.put(document_id_of(passage), passage.text)
    question = Question("q", "Who keeps the key?", ("the baker",), found)
    meter = QuestionMeter(cache, "tiny", question, AnswerLengths(4, 4), ReferenceShelf(tmp_path))
    arm = next(a for a in arms_for([policy], ["alone"], [0.9999]) if a.name == policy)
    outcome = meter.measure(arm, None)
    names = [document_id_of(p) for p in found]
    how = AskOptions(policy=policy, policy_options=arm.options, max_tokens=1)
    plan = cache.plan(question.question, names, how)
    job = GenerationJob(plan.scoring(meter.full.forced_ids), SamplingParams(), 1)
    logits = cache.runtime.engine.submit(job).result().scored_logits
    assert outcome.mean_kl == pytest.approx(mean_kl(meter.full.logits, logits), rel=1e-3, abs=1e-8)
    first = kl_divergence(meter.full.logits[0], logits[0])
    assert outcome.kl_first == pytest.approx(first, rel=1e-3, abs=1e-8)
