"""JSON files of a model directory, read with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from chunkcache.errors import ModelFilesError


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The object in a file; empty where the file is missing and not required.

    Raises:
        ModelFilesError: The file is missing, cannot be read, or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelFilesError(f"{path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object")
    return value
