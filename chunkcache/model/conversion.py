"""``chunkcache models convert``: a model in a form that is not loaded, made into one that is."""

from collections.abc import Callable
from pathlib import Path

from chunkcache.errors import ModelFilesError
from chunkcache.model.gguf import write_converted_gguf
from chunkcache.model.pickle_checkpoint import Converted, convert_pickle, has_pickle

Progress = Callable[[str], None]


def convert_model(source: Path, target: Path, progress: Progress) -> Converted:
    """Convert a directory with a pickled checkpoint, or a GGUF file, to a safetensors directory.

    Args:
        source: The directory or file.
        target: The new directory; it must not be there yet, or be empty.
        progress: Told what is going on, one line at a time.

    Raises:
        ModelFilesError: Nothing to convert, something in the way, unreadable, or no room.
        UnsupportedModelError: A GGUF file of a kind that cannot be converted.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelFilesError(f"{target} is there already; name a new directory")
    if source.suffix == ".gguf":
        write_converted_gguf(source, target, progress)
        return _measured(target)
    if not source.is_dir():
        raise ModelFilesError(f"no model directory and no .gguf file at {source}")
    if has_pickle(source):
        return convert_pickle(source, target, progress)
    if list(source.glob("*.safetensors")):
        raise ModelFilesError(f"{source} holds safetensors: it can be loaded as it is")
    raise ModelFilesError(f"{source} has no pytorch_model.bin and no shards of one")


def _measured(directory: Path) -> Converted:
    from safetensors import safe_open

    files = list(directory.glob("*.safetensors"))
    num_tensors = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            num_tensors += len(file.keys())
    return Converted(directory, num_tensors, sum(f.stat().st_size for f in files))
