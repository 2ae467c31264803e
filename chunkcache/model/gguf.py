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

from blake3 import blake3

from chunkcache.errors import ModelFilesError, UnsupportedModelError

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
    return sum(int(t.n_elements) for t in reader.tensors), _PRE_TOKENIZERS[name]


def _convert_into(draft: Path, gguf_path: Path, pre_tokenizer: dict[str, Any] | None) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file_name = str(gguf_path.parent), gguf_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file_name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file_name, dtype=torch.float32)
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
