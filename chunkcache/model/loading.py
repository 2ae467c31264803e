"""Loading a model: files, weights, tokenizer, template, identity.

From a hub id, a local directory, a GGUF file, or the demo model. This is the only place that asks
``transformers`` to build something.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from chunkcache.errors import ModelFilesError
from chunkcache.identity import ModelIdentity, digest_fields
from chunkcache.model import int8
from chunkcache.model.adapter import CONFIG_NAME as ADAPTER_CONFIG_NAME
from chunkcache.model.adapter import WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from chunkcache.model.adapter import Adapter, check_base, read_adapter
from chunkcache.model.adapter_merge import merge_adapter
from chunkcache.model.chat_template import PLAIN_TEMPLATE, ChatTemplate
from chunkcache.model.config_files import code_digest, load_config, runs_own_code
from chunkcache.model.demo import DEMO_BASE_NAME, DEMO_MODEL, demo_gguf_path
from chunkcache.model.gguf import convert_gguf
from chunkcache.model.json_files import read_json
from chunkcache.model.product_bits import product_bits
from chunkcache.model.runner import ModelRunner
from chunkcache.model.spec import ModelSpec, spec_from_config
from chunkcache.model.template import PromptTemplate, split_template
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.model.tokenizer_files import read_tokenizer_files
from chunkcache.model.weight_files import find_weight_files, load_weights, own_memory, unchanged
from chunkcache.model.weights_digest import FileDigests

_VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
)
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]
Quantisation = Literal["none", "int8"]


@dataclass(frozen=True)
class AdapterInfo:
    """Which adapter a model has.

    Attributes:
        name: Display name.
        digest: Content digest.
    """

    name: str
    digest: bytes


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
        adapter: The adapter that is merged into the weights, or None.
    """

    runner: ModelRunner
    tokenizer: TextTokenizer
    chat: ChatTemplate
    template: PromptTemplate
    bos_token_id: int | None
    source_dir: Path
    adapter: AdapterInfo | None = None

    def answers_digest(self) -> bytes:
        """Digest of all about the model that an answer depends on: more than its entries do.

        The text around documents and question counts too, and so does what ends an answer.
        """
        fields = [("model", bytes(self.runner.digest)), ("bos", self.bos_token_id)]
        fields += [("eos", token_id) for token_id in sorted(self.runner.eos_token_ids)]
        fields.append(("template", msgspec.json.encode(self.template)))
        return digest_fields("answers", fields)

    def weights_facts(self) -> dict[str, Any]:
        """What the weights are, for people and programs: digest, dtype, rounding, adapter."""
        identity, adapter = self.runner.identity, self.adapter
        return {
            "digest": bytes(self.runner.digest).hex(),
            "dtype": identity.compute_dtype,
            "quantisation": "none" if identity.weights_format is None else "int8",
            "adapter": None
            if adapter is None
            else {"name": adapter.name, "digest": adapter.digest.hex()},
        }


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
    trust_remote_code: bool = False,
    progress: Progress = lambda line: None,
) -> ModelOutline:
    """Read a model's configuration and tokenizer. A GGUF file is converted first, once.

    Arguments and errors as in :func:`load_model`.
    """
    source_dir = _resolve(model, cache_dir, revision, progress, with_code=trust_remote_code)
    with_own_code = runs_own_code(source_dir, trust_remote_code=trust_remote_code)
    return ModelOutline(
        spec=spec_from_config(load_config(source_dir, with_own_code=with_own_code)),
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
    adapter: str | None = None,
    quantisation: Quantisation = "none",
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
        adapter: A LoRA adapter to merge: a PEFT directory or a hub id.
        quantisation: ``int8`` keeps the matrices as int8, for the CPU.
        progress: Told what is going on, one line at a time.

    Raises:
        ModelFilesError: Files are missing or unreadable, or do not belong together; the message
            names them.
        UnsupportedModelError: The family or a property of it, or of the adapter, is not supported.
        InvalidValueError: The quantisation is not for this device.
    """
    source_dir = _resolve(model, cache_dir, revision, progress, with_code=trust_remote_code)
    with_own_code = runs_own_code(source_dir, trust_remote_code=trust_remote_code)
    if with_own_code:
        progress(f"running the Python code that comes with {source_dir.name}, as you asked")
    config = load_config(source_dir, with_own_code=with_own_code)
    spec = spec_from_config(config)
    if quantisation == "int8":
        int8.check_int8(device, has_experts=spec.family.experts)
    chosen = _choose_dtype(dtype, device)
    merged = None if adapter is None else _adapter(adapter, model, source_dir, progress)
    files = find_weight_files(source_dir)
    text_files = read_tokenizer_files(source_dir)
    tokenizer = _tokenizer(text_files.definition, source_dir)
    if tokenizer.max_token_id >= config.vocab_size:
        raise ModelFilesError(
            f"the tokenizer has ids up to {tokenizer.max_token_id}, the model an embedding of "
            f"{config.vocab_size} rows: they do not belong together"
        )
    with unchanged(files):
        weights = FileDigests(cache_dir / "weights-digests.json").digest_all(files)
        progress(f"loading {model}")
        attention = "eager" if spec.family.attention_softcap else "sdpa"
        hf_model = load_weights(source_dir, chosen, attention, with_own_code=with_own_code)
        if merged is not None:
            progress(f"merging adapter {merged.name}")
            merge_adapter(hf_model, merged)
        if quantisation == "int8":
            int8.quantise_linears(hf_model)
        if _may_be_written_over(model):
            own_memory(hf_model)
        hf_model = hf_model.to(device)
    bits = product_bits(hf_model.model.layers[0], has_experts=spec.family.experts)
    identity = _identity(
        # The one that was used: the library has read the file again.
        hf_model.config,
        weights,
        tokenizer,
        code=code_digest(source_dir) if with_own_code else None,
        adapter=None if merged is None else merged.digest,
        dtype=chosen,
        weights_format=int8.FORMAT if quantisation == "int8" else None,
        num_threads=None if bits.threads_are_independent else torch.get_num_threads(),
    )
    special = text_files.special_tokens
    chat = ChatTemplate(text_files.chat_template or PLAIN_TEMPLATE, special, thinking)
    name = source_dir.name if Path(model).expanduser().exists() else model
    if merged is not None:
        name = f"{name}+{merged.name}"
    template = split_template(chat, tokenizer)
    if chat.is_plain:
        progress(f"{name} has no chat template: prompts are plain text")
    elif not template.has_system:
        progress(f"{name}'s chat template takes no system text: it goes into the user's turn")
    runner = ModelRunner(
        hf_model,
        identity,
        name,
        _eos_ids(hf_model),
        rows_are_independent=bits.rows_are_independent,
    )
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        chat=chat,
        template=template,
        bos_token_id=_bos_id(config, special, tokenizer),
        source_dir=source_dir,
        adapter=None if merged is None else AdapterInfo(merged.name, merged.digest),
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
    patterns = (*_HUB_PATTERNS, "*.py") if with_code else _HUB_PATTERNS
    return _download(model, revision, patterns, progress)


def _may_be_written_over(model: str) -> bool:
    """Whether the files are the user's own.

    Conversions and hub snapshots are named by what is in them: a new one takes a new place, and the
    library's map of the file can serve.
    """
    return model != DEMO_MODEL and Path(model).expanduser().is_dir()


def _download(name: str, revision: str | None, patterns: Sequence[str], progress: Progress) -> Path:
    """A snapshot of some of a hub repository's files."""
    from huggingface_hub import snapshot_download

    progress(f"looking up {name} on the hub")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFilesError(
            f"{name!r} is neither a directory nor a model that the hub gives: "
            f"{type(error).__name__}"
        ) from error


def _adapter(adapter: str, model: str, source_dir: Path, progress: Progress) -> Adapter:
    """The adapter of that name, which has to be for that model."""
    path, name = Path(adapter).expanduser(), adapter
    if path.is_dir():
        name = path.resolve().name
    elif path.is_absolute() or path.exists() or adapter.startswith((".", "~")):
        raise ModelFilesError(f"no adapter directory at {adapter}")
    else:
        path = _download(adapter, None, (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME), progress)
    found = read_adapter(path, name)
    known_as = read_json(source_dir / "config.json").get("_name_or_path")
    names = [DEMO_BASE_NAME if model == DEMO_MODEL else str(Path(model).expanduser())]
    check_base(found, *names, *([known_as] if isinstance(known_as, str) and known_as else []))
    return found


def _choose_dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ModelFilesError(f"dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _tokenizer(definition: str, source_dir: Path) -> TextTokenizer:
    try:
        return TextTokenizer(definition)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ModelFilesError(f"tokenizer.json in {source_dir} is not usable: {error}") from error


def _identity(
    config: Any,
    weights: bytes,
    tokenizer: TextTokenizer,
    *,
    code: bytes | None,
    adapter: bytes | None,
    dtype: torch.dtype,
    weights_format: str | None,
    num_threads: int | None,
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
        adapter=adapter,
        compute_dtype=str(dtype).removeprefix("torch."),
        weights_format=weights_format,
        num_threads=num_threads,
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
