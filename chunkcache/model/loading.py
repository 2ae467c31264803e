"""Loading a model: files, weights, tokenizer, template, identity.

From a hub id, a local directory, a GGUF file, or the demo model. This is the only place that asks
``transformers`` to build something.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from chunkcache.errors import ModelFilesError, UnsupportedModelError
from chunkcache.identity import ModelIdentity, digest_fields
from chunkcache.model.chat_template import PLAIN_TEMPLATE, ChatTemplate
from chunkcache.model.config_files import code_digest, load_config, runs_own_code
from chunkcache.model.demo import DEMO_MODEL, demo_gguf_path
from chunkcache.model.gguf import convert_gguf
from chunkcache.model.json_files import read_json
from chunkcache.model.loading_info import check_loading_info
from chunkcache.model.quiet import without_progress_bars
from chunkcache.model.runner import ModelRunner
from chunkcache.model.spec import ModelSpec, spec_from_config
from chunkcache.model.template import PromptTemplate, split_template
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.model.tokenizer_files import read_tokenizer_files
from chunkcache.model.weights_digest import FileDigests

_VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
)
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use.

    Attributes:
        runner: The forward.
        tokenizer: Text to ids and back.
        chat: The model's chat template.
        template: The prompt's fixed segments.
        bos_token_id: Id of BOS, or None.
        source_dir: Directory the files came from.
    """

    runner: ModelRunner
    tokenizer: TextTokenizer
    chat: ChatTemplate
    template: PromptTemplate
    bos_token_id: int | None
    source_dir: Path


@dataclass(frozen=True)
class ModelOutline:
    """What a model's small files say, its weights left aside.

    Attributes:
        spec: Geometry.
        tokenizer: Text to ids and back.
        dtype: Compute dtype that it would be loaded in.
    """

    spec: ModelSpec
    tokenizer: TextTokenizer
    dtype: torch.dtype


def outline_model(
    model: str,
    *,
    cache_dir: Path,
    device: str = "cpu",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress = lambda line: None,
) -> ModelOutline:
    """Read a model's configuration and tokenizer. A GGUF file is converted first, once.

    Arguments and errors as in :func:`load_model`.
    """
    source_dir = _resolve(model, cache_dir, revision, progress, with_code=False)
    return ModelOutline(
        spec=spec_from_config(load_config(source_dir, with_own_code=False)),
        tokenizer=_tokenizer(read_tokenizer_files(source_dir).definition, source_dir),
        dtype=_choose_dtype(dtype, device),
    )


def load_model(
    model: str,
    *,
    cache_dir: Path,
    device: str = "cpu",
    dtype: str = "auto",
    revision: str | None = None,
    thinking: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = lambda line: None,
) -> LoadedModel:
    """Load a model by name or path.

    Args:
        model: ``demo``, a directory, a ``.gguf`` file, or a hub id.
        cache_dir: Where conversions and remembered digests are kept.
        device: Torch device.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: fp32 on the CPU (bf16 is
            several times slower on most), bf16 elsewhere.
        revision: Hub revision, for hub ids.
        thinking: What a chat template with a switch for it is told.
        trust_remote_code: Whether a model directory's own Python code may be run.
        progress: Told what is going on, one line at a time.

    Raises:
        ModelFilesError: Files are missing or unreadable; the message names them.
        UnsupportedModelError: The family or a property of it is not supported.
    """
    source_dir = _resolve(model, cache_dir, revision, progress, with_code=trust_remote_code)
    with_own_code = runs_own_code(source_dir, trust_remote_code=trust_remote_code)
    if with_own_code:
        progress(f"running the Python code that comes with {source_dir.name}, as you asked")
    config = load_config(source_dir, with_own_code=with_own_code)
    spec = spec_from_config(config)
    chosen = _choose_dtype(dtype, device)
    files = _weight_files(source_dir)
    text_files = read_tokenizer_files(source_dir)
    tokenizer = _tokenizer(text_files.definition, source_dir)
    if tokenizer.max_token_id >= config.vocab_size:
        raise ModelFilesError(
            f"the tokenizer has ids up to {tokenizer.max_token_id}, the model an embedding of "
            f"{config.vocab_size} rows: they do not belong together"
        )
    weights = FileDigests(cache_dir / "weights-digests.json").digest_all(files)
    code = code_digest(source_dir) if with_own_code else None
    identity = _identity(config, weights, tokenizer, chosen, code)
    progress(f"loading {model}")
    attention = "eager" if spec.family.attention_softcap else "sdpa"
    hf_model = _load_weights(source_dir, chosen, device, attention, with_own_code=with_own_code)
    special = text_files.special_tokens
    chat = ChatTemplate(text_files.chat_template or PLAIN_TEMPLATE, special, thinking)
    name = source_dir.name if Path(model).expanduser().exists() else model
    template = split_template(chat, tokenizer)
    if chat.is_plain:
        progress(f"{name} has no chat template: prompts are plain text")
    elif not template.has_system:
        progress(f"{name}'s chat template takes no system text: it goes into the user's turn")
    runner = ModelRunner(hf_model, identity, name, _eos_ids(hf_model))
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        chat=chat,
        template=template,
        bos_token_id=_bos_id(config, special, tokenizer),
        source_dir=source_dir,
    )


def _resolve(
    model: str, cache_dir: Path, revision: str | None, progress: Progress, *, with_code: bool
) -> Path:
    if model == DEMO_MODEL:
        return convert_gguf(demo_gguf_path(), cache_dir / "models", progress)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return convert_gguf(path, cache_dir / "models", progress)
    if path.is_dir():
        return path
    if path.is_absolute() or path.exists() or model.startswith((".", "~")):
        raise ModelFilesError(f"no model directory at {model}")
    from huggingface_hub import snapshot_download

    progress(f"looking up {model} on the hub")
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*_HUB_PATTERNS, *(["*.py"] if with_code else [])],
            )
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFilesError(
            f"{model!r} is neither a directory nor a model that the hub gives: "
            f"{type(error).__name__}"
        ) from error


def _choose_dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ModelFilesError(f"dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _weight_files(source_dir: Path) -> list[Path]:
    index = read_json(source_dir / "model.safetensors.index.json", required=False)
    if (source_dir / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{source_dir.name} holds an adapter (adapter_config.json); merge it first"
        )
    if index and not (source_dir / "model.safetensors").is_file():
        names = sorted(set(index.get("weight_map", {}).values()))
        files = [source_dir / name for name in names]
    else:
        files = [source_dir / "model.safetensors"]
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        other = [p.name for p in source_dir.glob("*.bin")]
        hint = (
            f" (found {', '.join(other)}: pickle checkpoints are not loaded; see chunkcache models convert)"
            if other
            else ""
        )
        raise ModelFilesError(f"{source_dir} has no {', '.join(missing)}{hint}")
    return files


def _tokenizer(definition: str, source_dir: Path) -> TextTokenizer:
    try:
        return TextTokenizer(definition)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ModelFilesError(f"tokenizer.json in {source_dir} is not usable: {error}") from error


def _load_weights(
    source_dir: Path, dtype: torch.dtype, device: str, attention: str, *, with_own_code: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source_dir,
                dtype=dtype,
                trust_remote_code=with_own_code,
                use_safetensors=True,
                attn_implementation=attention,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelFilesError(f"the weights in {source_dir} cannot be loaded: {error}") from error
    model, info = loaded
    check_loading_info(info, source_dir.name)
    return model.to(device)


def _identity(
    config: Any,
    weights: bytes,
    tokenizer: TextTokenizer,
    dtype: torch.dtype,
    code: bytes | None,
) -> ModelIdentity:
    facts = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE_CONFIG_KEYS}
    rope = facts.pop("rope_parameters", None)
    fields: list[tuple[str, bytes | str]] = [
        ("json", json.dumps(facts, sort_keys=True, default=str))
    ]
    if code is not None:
        fields.append(("code", code))
    return ModelIdentity(
        weights=weights,
        config=digest_fields("config", fields),
        rope=digest_fields("rope", [("json", json.dumps(rope, sort_keys=True, default=str))]),
        tokenizer=tokenizer.digest,
        adapter=None,
        compute_dtype=str(dtype).removeprefix("torch."),
    )


def _eos_ids(hf_model: Any) -> frozenset[int]:
    ids: set[int] = set()
    for config in (hf_model.config, getattr(hf_model, "generation_config", None)):
        value = getattr(config, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(int(v) for v in value)
    return frozenset(ids)


def _bos_id(config: Any, special: dict[str, str], tokenizer: TextTokenizer) -> int | None:
    if "bos_token" not in special:
        return None
    ids = tokenizer.encode_template(special["bos_token"])
    if len(ids) == 1:
        return ids[0]
    value = getattr(config, "bos_token_id", None)
    return value if isinstance(value, int) else None
