"""A model directory's configuration, and whether Python code of its own may be run for it.

Such code is run for nobody who has not asked for it by name, and never where the library knows the
model type itself.
"""

from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from chunkcache.errors import UnsupportedModelError
from chunkcache.identity import digest_fields
from chunkcache.model.json_files import read_json

_ELSEWHERE: Final = "--"
"""Stands between a repository and a class, where code is not the directory's own."""


def runs_own_code(source_dir: Path, *, trust_remote_code: bool) -> bool:
    """Whether the directory's own code is to be run.

    Raises:
        UnsupportedModelError: It would have to be, and is not trusted; says how to trust it. Or
            it is not in the directory.
    """
    from transformers import CONFIG_MAPPING

    raw = read_json(source_dir / "config.json")
    model_type = raw.get("model_type")
    if not raw.get("auto_map") or model_type in CONFIG_MAPPING:
        return False
    if not trust_remote_code:
        raise UnsupportedModelError(
            f"model type {model_type!r} needs Python code that comes with the model (auto_map in "
            "config.json), and that is not run unless you say so: read the code, then set "
            "trust_remote_code (CHUNKCACHE_TRUST_REMOTE_CODE=1). It helps "
            "where the model's configuration class derives from a supported family's"
        )
    foreign = sorted(str(v) for v in raw["auto_map"].values() if _ELSEWHERE in str(v))
    if foreign:
        raise UnsupportedModelError(
            f"auto_map in config.json names code of another repository ({foreign[0]}), which is no "
            "part of the model's identity: put the files beside config.json and name them there"
        )
    return True


def load_config(source_dir: Path, *, with_own_code: bool) -> Any:
    """The directory's ``PreTrainedConfig``.

    Raises:
        ModelFilesError: There is no readable ``config.json``.
        UnsupportedModelError: The library does not know the model type, or its code fails.
    """
    from transformers import AutoConfig

    raw = read_json(source_dir / "config.json")
    try:
        return AutoConfig.from_pretrained(source_dir, trust_remote_code=with_own_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        name = f"model type {raw.get('model_type')!r}"
        raise UnsupportedModelError(
            f"{name} cannot be loaded with its own code: {error}"
            if with_own_code
            else f"{name} is not known to this transformers release"
        ) from error


def code_digest(source_dir: Path) -> bytes:
    """Digest of the directory's Python files: keys depend on code that is run."""
    files = sorted(source_dir.glob("*.py"))
    return digest_fields(
        "code", [(path.name, blake3(path.read_bytes()).digest()) for path in files]
    )
