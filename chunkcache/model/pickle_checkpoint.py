"""Pickled checkpoints (``pytorch_model.bin``) rewritten as safetensors, on an explicit command only.

A pickle is a program. It is read by the restricted reader of ``torch``, which builds tensors and
plain containers and refuses everything else; and it is read here, nowhere else, once.
"""

import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from chunkcache.errors import ModelFilesError
from chunkcache.model.draft import check_room, drafted_directory
from chunkcache.model.json_files import read_json

_INDEX = "pytorch_model.bin.index.json"
_INDEX_END = ".index.json"
"""The shards of the new directory are others than those of the old one, in whichever format."""
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""What comes along beside the weights; Python files are copied, never run."""
_UNREADABLE = (
    UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What the reader raises for bytes that are not what they seem: it checks few of them itself."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Converted:
    """A converted model.

    Attributes:
        directory: Where it is.
        num_tensors: Tensors in its weight files.
        weight_bytes: Size of its weight files.
    """

    directory: Path
    num_tensors: int
    weight_bytes: int


def has_pickle(source_dir: Path) -> bool:
    """Whether a directory holds a pickled checkpoint."""
    return (source_dir / _INDEX).is_file() or (source_dir / "pytorch_model.bin").is_file()


def convert_pickle(source_dir: Path, target: Path, progress: Progress) -> Converted:
    """Write a directory's pickled checkpoint as safetensors, with everything else it needs.

    Args:
        source_dir: Holds ``config.json`` and ``pytorch_model.bin`` or its shards.
        target: The new directory; appears when it is complete.
        progress: Told what is going on, one line at a time.

    Raises:
        ModelFilesError: A file is missing or cannot be read, holds anything that is not a plain
            tensor, or there is no room.
    """
    if not (source_dir / "config.json").is_file():
        raise ModelFilesError(f"{source_dir} has no config.json")
    shards = _shards(source_dir)
    check_room(target.parent, sum(s.stat().st_size for s in shards), source_dir.name)
    with drafted_directory(target) as draft:
        weight_map: dict[str, str] = {}
        num_bytes = 0
        for number, shard in enumerate(shards, 1):
            size_mb = shard.stat().st_size / 1e6
            progress(f"converting {shard.name} ({number} of {len(shards)}, {size_mb:,.0f} MB)")
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = _tensors(shard)
            check_room(target.parent, sum(t.nbytes for t in tensors.values()), shard.name)
            twice = sorted(set(tensors) & set(weight_map))
            if twice:
                raise ModelFilesError(f"{shard.name} holds {twice[0]!r}, as a shard before it does")
            _save(tensors, draft / name)
            num_bytes += (draft / name).stat().st_size
            weight_map |= dict.fromkeys(tensors, name)
            del tensors
        if len(shards) > 1:
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for pattern in _COPIED:
            for path in source_dir.glob(pattern):
                if not path.name.endswith(_INDEX_END) and path.is_file():
                    shutil.copyfile(path, draft / path.name)
    return Converted(target, len(weight_map), num_bytes)


def _shards(source_dir: Path) -> list[Path]:
    names = ["pytorch_model.bin"]
    if (source_dir / _INDEX).is_file():
        weight_map = read_json(source_dir / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFilesError(f"{_INDEX} in {source_dir} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (source_dir / name).is_file():
            raise ModelFilesError(f"{source_dir} has no {name}")
    return [source_dir / name for name in names]


def _tensors(path: Path) -> dict[str, Any]:
    """The tensors of one file, by name."""
    import torch

    try:
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise ModelFilesError(
            f"{path.name} is damaged, or holds more than tensors and is not read: {reason}"
        ) from error
    if not isinstance(loaded, dict):
        raise ModelFilesError(
            f"{path.name} holds a {type(loaded).__name__}, not a table of tensors by name"
        )
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ModelFilesError(f"{path.name} holds {name!r}, a {kind}: only tensors are taken")
        is_strange = value.is_quantized or value.is_meta or value.is_complex() or value.is_neg()
        if is_strange or value.layout != torch.strided or _is_spread(value):
            raise ModelFilesError(f"{path.name} holds {name!r}, which is no plain tensor")
    return loaded


def _is_spread(tensor: Any) -> bool:
    """Whether a tensor is larger than the memory that it shows: a few bytes can say terabytes."""
    return tensor.nbytes > tensor.untyped_storage().nbytes()


def _save(tensors: dict[str, Any], path: Path) -> None:
    """Each tensor with memory of its own: tied ones share theirs, and safetensors takes no such."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        if not is_whole or not tensor.is_contiguous() or storage.data_ptr() in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())
        own[name] = tensor.detach()
    try:
        save_file(own, path, metadata={"format": "pt"})
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelFilesError(f"{path.name} cannot be written: {error}") from error
