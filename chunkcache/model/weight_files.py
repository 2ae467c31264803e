"""The weight files of a model directory: which they are, and what they give once they are loaded.

What is missing, truncated, misnamed or of another shape than the configuration says is refused in
one line. Loaded weights are in the process's own memory: the library maps the files, and a file
that is rewritten later would change a model that runs, or end the process.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from chunkcache.errors import ModelFilesError, UnsupportedModelError
from chunkcache.model.adapter import CONFIG_NAME as ADAPTER_CONFIG_NAME
from chunkcache.model.json_files import read_json
from chunkcache.model.loading_info import check_loading_info
from chunkcache.model.quiet import quiet_library

_INDEX_NAME: Final = "model.safetensors.index.json"
_SINGLE_NAME: Final = "model.safetensors"


def find_weight_files(source_dir: Path) -> list[Path]:
    """The safetensors files of a directory, each of which can be read.

    Raises:
        ModelFilesError: One is missing, is cut off, or is no such file; the index and its files
            disagree; the configuration names another file.
        UnsupportedModelError: The directory holds an adapter.
    """
    if (source_dir / ADAPTER_CONFIG_NAME).is_file():
        raise UnsupportedModelError(
            f"{source_dir.name} holds an adapter ({ADAPTER_CONFIG_NAME}), no model: give its base as "
            "the model and this directory as the adapter"
        )
    elsewhere = read_json(source_dir / "config.json", required=False).get("transformers_weights")
    if elsewhere is not None:
        raise ModelFilesError(
            f"config.json in {source_dir} has the library load {elsewhere!r} (transformers_weights); "
            f"name the file {_SINGLE_NAME}, or write an index"
        )
    index = read_json(source_dir / _INDEX_NAME, required=False)
    if not index or (source_dir / _SINGLE_NAME).is_file():
        wanted: dict[str, set[str]] = {_SINGLE_NAME: set()}
    else:
        wanted = _by_file(index)
    missing = sorted(name for name in wanted if not (source_dir / name).is_file())
    if missing:
        other = sorted(p.name for p in source_dir.glob("*.bin"))
        hint = ""
        if other:
            hint = (
                f" (found {', '.join(other)}: pickle checkpoints are not loaded; see chunkcache "
                "models convert)"
            )
        raise ModelFilesError(f"{source_dir} has no {', '.join(missing)}{hint}")
    for name, tensors in wanted.items():
        lacking = sorted(tensors - _tensor_names(source_dir / name))
        if lacking:
            raise ModelFilesError(
                f"{source_dir / name} has no tensor {', '.join(lacking[:4])}, which {_INDEX_NAME} "
                "says is there"
            )
    return [source_dir / name for name in wanted]


def load_weights(
    source_dir: Path, dtype: torch.dtype, attention: str, *, with_own_code: bool = False
) -> Any:
    """The model, its weights mapped from the files as far as possible.

    Args:
        source_dir: A directory whose files are there.
        dtype: Of the weights.
        attention: The library's name of the attention that its own forward uses.
        with_own_code: Whether the directory's own Python code is to be run.

    Raises:
        ModelFilesError: The files do not give the model that the configuration describes.
    """
    from transformers import AutoModelForCausalLM

    try:
        with quiet_library():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source_dir,
                dtype=dtype,
                trust_remote_code=with_own_code,
                use_safetensors=True,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelFilesError(
            f"the weights in {source_dir} cannot be loaded: {_one_line(error)}"
        ) from error
    model, info = loaded
    check_loading_info(info, source_dir.name)
    return model


def own_memory(model: torch.nn.Module) -> None:
    """Give every parameter memory of its own, where the library maps the file that it came from."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@contextmanager
def unchanged(files: Sequence[Path]) -> Iterator[None]:
    """Whatever is read of the files inside is of one state of them.

    Raises:
        ModelFilesError: One was changed meanwhile.
    """
    before = [_state(path) for path in files]
    yield
    changed = [p.name for p, state in zip(files, before, strict=True) if _state(p) != state]
    if changed:
        raise ModelFilesError(f"{', '.join(changed)} changed while it was being loaded; try again")


def _by_file(index: dict[str, Any]) -> dict[str, set[str]]:
    """Tensor names by the file that the index puts them in."""
    weight_map = index.get("weight_map")
    wanted: dict[str, set[str]] = {}
    for tensor, name in weight_map.items() if isinstance(weight_map, dict) else ():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFilesError(f"{_INDEX_NAME} names {name!r}, which is no file beside it")
        wanted.setdefault(name, set()).add(tensor)
    if not wanted:
        raise ModelFilesError(f"{_INDEX_NAME} names no files")
    return wanted


def _tensor_names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{path} is cut off or damaged: {_one_line(error)}") from error


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]
