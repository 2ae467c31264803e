"""Tokenizers of every kind that models have, trained here on a few sentences."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CONTROL = (
    "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|start_of_role|>", "<|end_of_role|>", "<|endoftext|>",
    "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
"""Control tokens of all the families' templates, each one id."""

_TEXT = """\
The harbour opens at seven in the morning, and the ferry leaves from the northern pier at nine.
Who keeps the key to the tower? The baker does. The code of the door is 4017, of the gate 365.
Documents: Question: Answer in one short sentence. You are a helpful AI assistant.
system user assistant model Today Date: 26 Jul 2024 Cutting Knowledge December 2023 metadata
Überall liegt Schnee; 港は朝七時に開きます。 It's what we'd say, isn't it?
"""
_BYTES = [f"<0x{i:02X}>" for i in range(256)]
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _trained(tokenizer: Any, *, first: tuple[str, ...] = (), alphabet: bool = False) -> str:
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=list(first),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return tokenizer.to_str()


def _byte_level() -> str:
    """GPT-2 and what follows it: bytes as letters, no BOS."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, alphabet=True)


def _split_bytes() -> str:
    """Llama 3, Qwen: a pattern of its own, whole words first, and a BOS that the library adds."""
    tokenizer: Any = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = _trained(tokenizer, alphabet=True)
    tokenizer = Tokenizer.from_str(text)
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                f"{bos} $A", f"{bos} $A {bos} $B", [(bos, tokenizer.token_to_id(bos))]
            ),
        ]
    )
    return tokenizer.to_str()


def _sentencepiece(normalizer: Any, pre_tokenizer: Any, *, strips: bool) -> str:
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    # The pieces are learned word by word, as sentencepiece does.
    learner: Any = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator(
        _TEXT.splitlines(),
        trainers.BpeTrainer(vocab_size=600, show_progress=False),
    )
    import json

    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocab = dict.fromkeys([*CONTROL[:3], *_BYTES, "▁", *pieces])
    definition = json.loads(tokenizer.to_str())
    definition["model"]["vocab"] = {piece: i for i, piece in enumerate(vocab)}
    definition["model"]["merges"] = learned["merges"]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return tokenizer.to_str()


def _llama_2() -> str:
    """A dummy space in front of every text, put there by the normalizer."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(spaces, None, strips=True)


def _mistral() -> str:
    """A dummy space in front of the first text alone."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _sentencepiece(None, metaspace, strips=True)


def _gemma() -> str:
    """Spaces as a letter, none of them dummies."""
    return _sentencepiece(
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        strips=False,
    )


def _unigram() -> str:
    """Pieces with probabilities, the control tokens among them; a dummy space."""
    import json

    learned = json.loads(_gemma())["model"]["vocab"]
    pieces = [(piece, -1.0 - 0.02 * i) for i, piece in enumerate(learned)]
    tokenizer: Any = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL])
    return tokenizer.to_str()


DEFINITIONS: dict[str, Callable[[], str]] = {
    "byte-level": _byte_level,
    "split-bytes": _split_bytes,
    "llama-2": _llama_2,
    "mistral": _mistral,
    "gemma": _gemma,
    "unigram": _unigram,
}


@pytest.fixture(scope="session")
def definition_of() -> Callable[[str], str]:
    """A ``tokenizer.json`` by its kind."""
    made: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in made:
            made[kind] = DEFINITIONS[kind]()
        return made[kind]

    return make
