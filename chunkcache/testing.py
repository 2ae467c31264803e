"""Tiny models for tests: whole model directories of random weights, made in a fraction of a second.

Shipped with the package, so that whoever builds on it can test without a download. Knows how a
model directory looks on disk, and nothing of how the rest of the package uses one.
"""

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chunkcache.entry import Entry
from chunkcache.errors import EngineFailedError
from chunkcache.tier_conformance import TierConformance, conformance_entry

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "TINY_FAMILIES",
    "ScriptedPrefill",
    "TierConformance",
    "conformance_entry",
    "tiny_tokenizer_json",
    "write_tiny_model",
]

_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
    },
    "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 512},
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
"""Per family, what its configuration needs beside the common fields to use what sets it apart."""

TINY_FAMILIES = tuple(_FAMILY_FIELDS)
"""Families that :func:`write_tiny_model` can write."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens of the tiny tokenizer; their ids are their places here."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""

_NUM_MERGES = 160
_MERGE_SAMPLE = """
system user assistant You are a helpful AI assistant. Answer the question from the documents.
Documents: Question: Answer in one short sentence.
The harbour opens at seven in the morning and the ferry to the island leaves from the northern pier.
Who keeps the key to the tower? What is the name of the river? When was the bridge built?
A document is split into chunks and the chunks of a document are kept in the store.
The library stands between the station and the old market; the code of the door is 4017.
"""


def write_tiny_model(
    directory: Path | str, *, family: str = "llama", seed: int = 0, **config: Any
) -> Path:
    """Write a model of random weights with its tokenizer and chat template.

    Two layers (SmolLM3: four), hidden size 64, four query heads over two KV heads, 512 positions, a byte-level
    BPE tokenizer of 419 tokens that reads any text, ChatML. The same arguments give the same
    bytes. The rows of the control tokens in the output matrix are zero, so that greedy answers
    run to their limit; give ``eos_token_id`` to have one end earlier.

    Args:
        directory: Where to write; made if missing.
        family: One of :data:`TINY_FAMILIES`.
        seed: Seed of the weights.
        config: Fields of the family's Hugging Face configuration to set instead.

    Returns:
        The directory, ready for ``load_model`` and for ``from_pretrained``.

    Raises:
        ValueError: For another family.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in TINY_FAMILIES:
        raise ValueError(f"family {family!r} is not one of {', '.join(TINY_FAMILIES)}")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    definition = tiny_tokenizer_json()
    (target / "tokenizer.json").write_text(definition, encoding="utf-8")
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "vocab_size": len(json.loads(definition)["model"]["vocab"]),
        "initializer_range": 0.12,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index("<|im_start|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    }
    fields |= _FAMILY_FIELDS[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields | config))
    with torch.no_grad():
        model.get_output_embeddings().weight[: len(SPECIAL_TOKENS)] = 0
    model.to(torch.float32).save_pretrained(target)
    (target / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        ),
        encoding="utf-8",
    )
    return target


def write_tiny_adapter(
    directory: Path | str,
    base: Path | str,
    *,
    seed: int = 0,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj", "v_proj", "down_proj"),
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """Write a LoRA adapter of random weights, as PEFT would.

    Args:
        directory: Where to write; made if missing.
        base: A model directory that the adapter is for.
        seed: Seed of the weights.
        rank: Rank of the updates.
        modules: Last parts of the names of the matrices that have an update.
        scale: Standard deviation of the tensors.
        config: Fields of ``adapter_config.json`` to set instead; None leaves one out.

    Returns:
        The directory.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target, generator = Path(directory), torch.Generator().manual_seed(seed)
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(Path(base) / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            rows, columns = weight.shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                drawn = scale * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = drawn
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "bias": "none",
        "inference_mode": True,
    }
    fields = {k: v for k, v in (fields | config).items() if v is not None}
    (target / "adapter_config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return target


def tiny_tokenizer_json() -> str:
    """A ``tokenizer.json``: every byte, some merges of common words, three control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(tuple(word) for word, _ in byte_level.pre_tokenize_str(_MERGE_SAMPLE))
    vocab = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = _learn_merges(words, _NUM_MERGES)
    vocab += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return tokenizer.to_str()


def _learn_merges(words: Counter[tuple[str, ...]], num_merges: int) -> list[tuple[str, str]]:
    """Learned here, not by the library's trainer: the same merges in each of its releases."""
    merges: list[tuple[str, str]] = []
    pieces = {tuple(word): list(word) for word in words}
    while len(merges) < num_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(pieces[word], pieces[word][1:], strict=False):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for split in pieces.values():
            _merge(split, best)
    return merges


def _merge(split: list[str], pair: tuple[str, str]) -> None:
    i = 0
    while i < len(split) - 1:
        if (split[i], split[i + 1]) == pair:
            split[i : i + 2] = [pair[0] + pair[1]]
        i += 1


class ScriptedPrefill:
    """Stands in for an isolated prefill: counts its calls, may wait, may fail a few times first.

    Attributes:
        entry: What it gives.
        num_calls: Calls so far.
        started: Set when a call begins.
        may_finish: Calls wait for it; set at first.
    """

    def __init__(self, entry: Entry, *, failures: int = 0, error: Exception | None = None) -> None:
        self.entry = entry
        self.failures = failures
        self.error = error or EngineFailedError("prefill failed")
        self.num_calls = 0
        self.started = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()

    def __call__(self) -> Entry:
        """Give the entry, or fail as told."""
        self.num_calls += 1
        self.started.set()
        assert self.may_finish.wait(30)
        if self.num_calls <= self.failures:
            raise self.error
        return replace(self.entry, k=self.entry.k.clone(), v=self.entry.v.clone())
