"""The full prefill's own answer to a question, which every arm is measured against.

It is the same whatever the chunks are prepared behind, so a run keeps it in its folder and runs it
once for all preparations, and for arms that are added later. Knows files; runs no model.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class Reference:
    """What the full prefill answered.

    Attributes:
        text: Its greedy answer.
        token_ids: The answer's tokens, without the end token.
        logits: fp32 ``[N, vocab]`` that its first tokens (and the end token) were drawn from.
        prompt_tokens: Length of the prompt.
        charged_ratio: Layer-rows run over layers times context tokens.
        ttft_ms: Time to the first token in milliseconds.
    """

    text: str
    token_ids: tuple[int, ...]
    logits: torch.Tensor
    prompt_tokens: int
    charged_ratio: float
    ttft_ms: float

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """The tokens behind which all logits but the first stand."""
        return self.token_ids[: len(self.logits) - 1]


class ReferenceShelf:
    """References in files of a folder, one a question.

    Args:
        folder: Made when the first one is written. What it holds must be of one model, and of one
            length of answers: a run's folder is tied to both.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, prompt_ids: tuple[int, ...]) -> Reference | None:
        """The reference of a prompt; None where there is none, or a damaged one."""
        path = self._path(prompt_ids)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                return _reference(file.metadata(), file.get_tensor("logits"))
        except (SafetensorError, KeyError, TypeError, ValueError):
            return None

    def put(self, prompt_ids: tuple[int, ...], reference: Reference) -> None:
        """Keep the reference of a prompt."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(prompt_ids)
        written = path.with_suffix(".tmp")
        answer = {
            "text": reference.text,
            "token_ids": reference.token_ids,
            "prompt_tokens": reference.prompt_tokens,
            "charged_ratio": reference.charged_ratio,
            "ttft_ms": reference.ttft_ms,
        }
        save_file(
            {"logits": reference.logits.contiguous()}, written, {"answer": json.dumps(answer)}
        )
        os.replace(written, path)

    def _path(self, prompt_ids: tuple[int, ...]) -> Path:
        name = hashlib.sha256(repr(prompt_ids).encode()).hexdigest()[:32]
        return self._folder / f"{name}.safetensors"


def _reference(metadata: dict[str, str], logits: torch.Tensor) -> Reference:
    answer = json.loads(metadata["answer"])
    return Reference(
        text=answer["text"],
        token_ids=tuple(answer["token_ids"]),
        logits=logits,
        prompt_tokens=answer["prompt_tokens"],
        charged_ratio=answer["charged_ratio"],
        ttft_ms=answer["ttft_ms"],
    )
