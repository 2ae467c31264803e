"""What one arm made of one question: the record that a quality run writes and its summaries read.

This file knows the fields and their JSON form. It doesn't know how they are measured.
"""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Outcome:
    """One question answered by one arm, measured against the full prefill's own answer.

    Attributes:
        data: Stem of the data file.
        question_id: The question's id in that file.
        task: The record's `meta.task`, or its source; empty when it names neither.
        policy: Name of the arm, such as "hybrid", "cacheblend" or "prophetkv".
        preparation: How the chunks were prefilled.
        ratio: The nominal ratio; None for policies that have none.
        charged_ratio: Layer-rows run by the fusion over layers times context tokens.
        prompt_tokens: Length of the prompt.
        kl_first: KL divergence of the first answer token's distribution, in nats.
        mean_kl: Mean KL divergence over the full prefill's greedy answer, in nats.
        agreement: Share of that answer that the arm's own greedy answer begins with.
        f1: Token F1 against the gold answers; None where there are none.
        exact_match: 1.0 or 0.0, None without gold answers.
        contains: Whether (or what share of) the gold answers stand in the answer.
        full_f1: F1 of the full prefill's answer to the same question.
        none_f1: F1 of policy `none` under the same preparation.
        ttft_ms: Time to the first token in milliseconds.
        full_ttft_ms: The same of the full prefill.
        answer: The arm's greedy answer.
        full_answer: The full prefill's greedy answer.
        ingest_cost: Rows that the offline job runs for the context's chunks over their tokens. What
            all chunks are prepared behind runs once and is not counted; neighbours are.
    """

    data: str
    question_id: str
    task: str
    policy: str
    preparation: str
    ratio: float | None
    charged_ratio: float
    prompt_tokens: int
    kl_first: float
    mean_kl: float
    agreement: float
    f1: float | None
    exact_match: float | None
    contains: float | None
    full_f1: float | None
    none_f1: float | None
    ttft_ms: float
    full_ttft_ms: float
    answer: str
    full_answer: str
    ingest_cost: float = 1.0


def encode_outcome(outcome: Outcome) -> bytes:
    """Returns the outcome as one line of JSON, without the line's end."""
    return msgspec.json.encode(outcome)


def decode_outcome(line: bytes | str) -> Outcome:
    """Reads one line of JSON.

    Raises:
        msgspec.DecodeError: If the line isn't one whole outcome.
    """
    return msgspec.json.decode(line, type=Outcome)
