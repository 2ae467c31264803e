"""A model directory's tokenizer and chat template, whichever files they are spread over.

``tokenizer.json`` is the truth where there is one. What older files beside it add (added tokens,
special ones by name) is merged in, so that a control token is known as one wherever it is said.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkcache.errors import ModelFilesError, UnsupportedModelError
from chunkcache.model.json_files import read_json

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OTHER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a directory says about text.

    Attributes:
        definition: A complete ``tokenizer.json``.
        special_tokens: Special tokens by name (``bos_token``, ...), as texts.
        chat_template: The default chat template's Jinja text, or None.
    """

    definition: str
    special_tokens: dict[str, str]
    chat_template: str | None


def read_tokenizer_files(source_dir: Path) -> TokenizerFiles:
    """Read them.

    Raises:
        ModelFilesError: There is no tokenizer, or one that cannot be read or contradicts itself.
        UnsupportedModelError: There are chat templates, but none of them is the default one.
    """
    config = read_json(source_dir / "tokenizer_config.json", required=False)
    special = _special_tokens(
        read_json(source_dir / "special_tokens_map.json", required=False) | config
    )
    definition = _definition(source_dir)
    try:
        parsed = json.loads(definition)
        changed = _merge_added_tokens(parsed, _declared_tokens(source_dir, config), special)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelFilesError(f"tokenizer.json in {source_dir} is not usable: {error}") from error
    return TokenizerFiles(
        json.dumps(parsed, ensure_ascii=False) if changed else definition,
        special,
        _chat_template(source_dir, config),
    )


def _definition(source_dir: Path) -> str:
    path = source_dir / "tokenizer.json"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return _converted(source_dir)
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error


def _converted(source_dir: Path) -> str:
    """The definition that the library makes of an older tokenizer's files."""
    found = [name for name in _OTHER_FILES if (source_dir / name).is_file()]
    if not found:
        raise ModelFilesError(
            f"{source_dir} has no tokenizer.json: a model without its tokenizer cannot read text"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source_dir, trust_remote_code=False)
        return tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # the library raises whatever its optional parts raise
        raise ModelFilesError(
            f"{source_dir} has no tokenizer.json, and {', '.join(found)} cannot be converted to "
            f"one here ({type(error).__name__}); save it once with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), where sentencepiece and "
            "protobuf are installed"
        ) from error


def _declared_tokens(source_dir: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Added tokens that older files declare, by their text."""
    plain = read_json(source_dir / "added_tokens.json", required=False)
    declared = {text: {"id": token_id} for text, token_id in plain.items()}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        declared[token["content"]] = token | {"id": int(token_id)}
    return declared


def _merge_added_tokens(
    parsed: dict[str, Any], declared: dict[str, dict[str, Any]], special: dict[str, str]
) -> bool:
    """Put declared tokens that the definition lacks into it; whether there were any."""
    vocab = parsed["model"].get("vocab") or {}
    if isinstance(vocab, list):
        vocab = {piece[0]: i for i, piece in enumerate(vocab)}
    added: list[dict[str, Any]] = parsed.get("added_tokens") or []
    known = {token["content"]: token for token in added}
    wanted = dict(declared)
    for text in special.values():
        if text not in known and text not in wanted and text in vocab:
            wanted[text] = {"id": vocab[text]}
        wanted.setdefault(text, {"id": None})
        wanted[text] = wanted[text] | {"special": True}
    changed = False
    for text, token in wanted.items():
        here = known.get(text)
        if here is None and token["id"] is not None:
            flags = {flag: bool(token.get(flag, False)) for flag in _FLAGS}
            added.append({"id": token["id"], "content": text} | flags)
            changed = True
        elif here is not None:
            if token["id"] not in (None, here["id"]):
                raise ValueError(f"token {text!r} has the id {here['id']}, elsewhere {token['id']}")
            if token.get("special") and not here["special"]:
                here["special"] = changed = True
    parsed["added_tokens"] = sorted(added, key=lambda token: token["id"])
    return changed


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _chat_template(source_dir: Path, config: dict[str, Any]) -> str | None:
    path = source_dir / "chat_template.jinja"
    try:
        text: Any = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not text:
        beside = read_json(source_dir / "chat_template.json", required=False)
        text = beside.get("chat_template") or config.get("chat_template")
    if isinstance(text, list):
        named = {t["name"]: t["template"] for t in text}
        if "default" not in named:
            raise UnsupportedModelError(
                f"{source_dir} has chat templates named {', '.join(sorted(named))}, none 'default'"
            )
        text = named["default"]
    return text or None
