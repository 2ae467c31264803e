"""GGUF files: dequantised once into a safetensors directory under the cache.

The conversion is done by ``transformers``, with ``gguf_facts.py`` to say what it would get wrong;
this module says first what it will need, and what it does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from blake3 import blake3

from chunkcache.errors import ModelFilesError
from chunkcache.model.draft import check_room, drafted_directory
from chunkcache.model.gguf_facts import GgufFacts, inspect_gguf
from chunkcache.model.loading_info import check_loading_info

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
    write_converted_gguf(gguf_path, target, progress)
    return target


def write_converted_gguf(gguf_path: Path, target: Path, progress: Progress) -> None:
    """Convert a GGUF file into a directory that is not there yet.

    Args:
        gguf_path: The GGUF file.
        target: The directory; appears when it is complete.
        progress: Told what is going on, one line at a time.

    Raises:
        ModelFilesError: The file cannot be read or there is no room for the copy.
        UnsupportedModelError: Its architecture, pre-tokenizer or a tensor type is not supported.
    """
    if not gguf_path.is_file():
        raise ModelFilesError(f"no GGUF file at {gguf_path}")
    facts = inspect_gguf(gguf_path)
    needed_bytes = 4 * facts.num_elements
    check_room(target.parent, needed_bytes, gguf_path.name)
    available_bytes = psutil.virtual_memory().available
    if 2 * needed_bytes > available_bytes:
        raise ModelFilesError(
            f"converting {gguf_path.name} needs about {2 * needed_bytes:,} bytes of memory, "
            f"{available_bytes:,} are available"
        )
    progress(f"converting {gguf_path.name} once ({needed_bytes / 1e6:,.0f} MB as fp32)")
    with drafted_directory(target) as draft:
        _convert_into(draft, gguf_path, facts)
    progress(f"converted model kept in {target}")


def _convert_into(draft: Path, gguf_path: Path, facts: GgufFacts) -> None:
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
    path = draft / "tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    facts.correct_tokenizer(definition)
    path.write_text(json.dumps(definition, ensure_ascii=False), encoding="utf-8")
    tensors = {n: p.detach().contiguous() for n, p in model.named_parameters()}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | facts.config
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    model.generation_config.save_pretrained(draft)
    (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
