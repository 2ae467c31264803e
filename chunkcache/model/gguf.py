"""GGUF files: dequantised once into a safetensors directory under the cache.

The conversion is done by ``transformers``; this module checks what it would get wrong without a
word (the pre-tokenizer), shows progress, and makes the result appear all at once or not at all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from blake3 import blake3

from chunkcache.errors import ModelFilesError, UnsupportedModelError
from chunkcache.model.loading_info import check_loading_info

_DIGITS_THEN_BYTES = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
_PRE_TOKENIZERS: dict[str, dict[str, Any] | None] = {
    "smollm": _DIGITS_THEN_BYTES,
    "gpt-2": None,
    "default": None,
}
"""Pre-tokenizer by its GGUF name; None keeps what the converter made."""

_ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")
"""Architectures, by their GGUF name, whose files say all that the model needs."""
_GEMMA3_HEAD_DIM = 256
_GEMMA3_WINDOW_PATTERN = 6
"""What the converter takes every Gemma 3 to have: scores scaled for heads of this size, and one
layer without a window in so many. The file does not say the scale."""

Progress = Callable[[str], None]


def convert_gguf(gguf_path: Path, cache_dir: Path, progress: Progress) -> Path:
    """The safetensors directory of a GGUF file, made if it is not there yet.

    Args:
        gguf_path: The GGUF file.
        cache_dir: Where converted models are kept; the directory's name holds the file's digest.
        progress: Told what is going on, one line at a time.

    Returns:
        A directory with ``config.json``, ``model.safetensors`` (fp32) and the tokenizer.

    Raises:
        ModelFilesError: The file cannot be read or there is no room for the copy.
        UnsupportedModelError: Its architecture or pre-tokenizer is not supported.
    """
    if not gguf_path.is_file():
        raise ModelFilesError(f"no GGUF file at {gguf_path}")
    digest = blake3(max_threads=blake3.AUTO).update_mmap(gguf_path).hexdigest()
    target = cache_dir / f"gguf-{digest[:32]}"
    if (target / "config.json").is_file():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    num_elements, pre_tokenizer = _inspect(gguf_path)
    needed_bytes = 4 * num_elements
    free_bytes = shutil.disk_usage(cache_dir).free
    if needed_bytes > free_bytes:
        raise ModelFilesError(
            f"converting {gguf_path.name} needs {needed_bytes:,} bytes in {cache_dir}, "
            f"{free_bytes:,} are free"
        )
    available_bytes = psutil.virtual_memory().available
    if 2 * needed_bytes > available_bytes:
        raise ModelFilesError(
            f"converting {gguf_path.name} needs about {2 * needed_bytes:,} bytes of memory, "
            f"{available_bytes:,} are available"
        )
    progress(f"converting {gguf_path.name} once ({needed_bytes / 1e6:,.0f} MB as fp32)")
    draft = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache_dir))
    try:
        _convert_into(draft, gguf_path, pre_tokenizer)
        try:
            draft.replace(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    progress(f"converted model kept in {target}")
    return target


def _inspect(gguf_path: Path) -> tuple[int, dict[str, Any] | None]:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelFilesError(f"{gguf_path.name} is not a readable GGUF file: {error}") from error
    field = reader.fields.get("tokenizer.ggml.pre")
    name = field.contents() if field is not None else "default"
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{gguf_path.name} uses the pre-tokenizer {name!r}; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    _check_contents(reader, gguf_path.name)
    return sum(int(t.n_elements) for t in reader.tensors), _PRE_TOKENIZERS[name]


def _check_contents(reader: Any, file_name: str) -> None:
    """Refuse what the converter would drop without a word or fail on late."""
    architecture = reader.fields.get("general.architecture")
    name = architecture.contents() if architecture is not None else None
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file_name} has the architecture {name!r}; converted are {', '.join(_ARCHITECTURES)}: "
            "use the original safetensors model"
        )
    if name == "gemma3":
        _check_gemma3(reader, file_name)
    scaling = sorted(f for f in reader.fields if ".rope.scaling." in f)
    scaling += [t.name for t in reader.tensors if t.name == "rope_freqs.weight"]
    if scaling:
        raise UnsupportedModelError(
            f"{file_name} scales its rotation ({', '.join(scaling)}); the conversion would lose "
            "that: use the original safetensors model"
        )
    kinds = {t.tensor_type for t in reader.tensors}
    unknown = sorted(k.name for k in kinds if not _can_dequantise(k))
    if unknown:
        raise UnsupportedModelError(f"{file_name} has tensors of type {', '.join(unknown)}")


def _check_gemma3(reader: Any, file_name: str) -> None:
    for field, assumed in (
        ("attention.key_length", _GEMMA3_HEAD_DIM),
        ("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN),
    ):
        found = reader.fields.get(f"gemma3.{field}")
        value = assumed if found is None else found.contents()
        if value != assumed:
            raise UnsupportedModelError(
                f"{file_name} has {field} {value}, where the conversion assumes {assumed}: use the "
                "original safetensors model"
            )


def _can_dequantise(kind: Any) -> bool:
    """Whether the library turns tensors of this type into floats; tried on one block of zeros."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    if kind.name in ("F32", "F16"):
        return True
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    try:
        dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def _convert_into(draft: Path, gguf_path: Path, pre_tokenizer: dict[str, Any] | None) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file_name = str(gguf_path.parent), gguf_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file_name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file_name, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    check_loading_info(info, file_name)
    tokenizer.save_pretrained(draft)
    if pre_tokenizer is not None:
        path = draft / "tokenizer.json"
        definition = json.loads(path.read_text())
        definition["pre_tokenizer"] = pre_tokenizer
        path.write_text(json.dumps(definition, ensure_ascii=False))
    tensors = {n: p.detach().contiguous() for n, p in model.named_parameters()}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    model.generation_config.save_pretrained(draft)
    with open(draft / "config.json", "w") as file:
        json.dump(config, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
