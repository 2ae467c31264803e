"""Embedding with a sentence-transformers model from a directory or a hub.

The library is imported when a model is loaded, not before: that takes seconds.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from chunkcache.errors import InvalidValueError, ModelFilesError, UnsupportedModelError
from chunkcache.identity import digest_fields
from chunkcache.model.quiet import quiet_library
from chunkcache.model.weights_digest import FileDigests
from chunkcache.short_thread import on_short_thread
from chunkcache_retriever.embedder import Vectors

_FILE_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model")
_MIN_TOKENS = 16


class SentenceTransformerEmbedder:
    """A sentence-transformers model, in fp32. It never looks at the network for a directory.

    Args:
        path_or_hub_id: A directory, or the name of a model on the hub.
        revision: Hub revision, for a hub id.
        device: Torch device.

    Raises:
        ModelFilesError: Files are missing, cannot be read, or hold pickled weights.
        UnsupportedModelError: The model does not say where its tokens lie in a text.

    Attributes:
        dim: Numbers per vector.
        digest: Names the model's files and how many tokens are read.
        max_tokens: Tokens of text read at once.
    """

    def __init__(
        self, path_or_hub_id: str | Path, *, revision: str | None = None, device: str = "cpu"
    ) -> None:
        source_dir = _resolve(path_or_hub_id, revision)
        files = _model_files(source_dir)
        model = _load(source_dir, device)
        self._model = model
        # The library's tokenizer cannot be used by two threads at once.
        self._lock = threading.Lock()
        self._tokenizer = _plain_tokenizer(model.tokenizer, source_dir)
        self._query_prompt = _prompt(model, "query")
        self._passage_prompt = _prompt(model, "document", "passage")
        self.max_tokens = self._num_content_tokens()
        self.dim = self._encode(["dimension"], self._passage_prompt).shape[1]
        names = [(path.relative_to(source_dir).as_posix(), path) for path in files]
        digests = FileDigests(None)
        self.digest = digest_fields(
            "sentence embedder",
            [
                *((name, digests.digest(path)) for name, path in sorted(names)),
                ("max_tokens", self.max_tokens),
            ],
        )

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """See :class:`~chunkcache_retriever.embedder.Embedder`."""
        return self._tokenizer.encode(text, add_special_tokens=False).offsets

    def embed(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        """See :class:`~chunkcache_retriever.embedder.Embedder`."""
        for text in texts:
            num_tokens = len(self.token_spans(text))
            if num_tokens > self.max_tokens:
                raise InvalidValueError(
                    f"a text of {num_tokens} tokens, over the embedder's {self.max_tokens}"
                )
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        return self._encode(texts, self._query_prompt if is_query else self._passage_prompt)

    def _encode(self, texts: Sequence[str], prompt: str) -> Vectors:
        with self._lock:
            vectors = on_short_thread(
                lambda: self._model.encode(
                    list(texts),
                    prompt=prompt,
                    # Padding to a neighbour's length would change a vector's last bits.
                    batch_size=1,
                    show_progress_bar=False,
                    convert_to_numpy=True,
                    normalize_embeddings=True,
                )
            )
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def _num_content_tokens(self) -> int:
        tokenizer = self._model.tokenizer
        limits = [v for v in (self._model.max_seq_length, tokenizer.model_max_length) if v]
        prompts = (self._query_prompt, self._passage_prompt)
        num_own = tokenizer.num_special_tokens_to_add(pair=False)
        num_content = int(min(limits)) - num_own - max(len(self.token_spans(p)) for p in prompts)
        if num_content < _MIN_TOKENS:
            raise UnsupportedModelError(
                f"the embedder reads {num_content} tokens of text at once, fewer than {_MIN_TOKENS}"
            )
        return num_content


def _resolve(path_or_hub_id: str | Path, revision: str | None) -> Path:
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    if isinstance(path_or_hub_id, Path) or path.is_absolute() or name.startswith((".", "~")):
        raise ModelFilesError(f"no embedder directory at {name}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILE_PATTERNS)))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFilesError(
            f"{name!r} is neither a directory nor a model that the hub gives: "
            f"{type(error).__name__}"
        ) from error


def _model_files(source_dir: Path) -> list[Path]:
    """The files that decide what the model computes."""
    if not (source_dir / "modules.json").is_file():
        raise ModelFilesError(
            f"{source_dir} has no modules.json: it is not a sentence-transformers model"
        )
    pickled = [p for p in source_dir.rglob("*.bin") if not any(p.parent.glob("*.safetensors"))]
    if pickled:
        raise ModelFilesError(
            f"{source_dir} holds {pickled[0].name}: pickle checkpoints are not loaded"
        )
    return [p for pattern in _FILE_PATTERNS for p in source_dir.rglob(pattern) if p.is_file()]


def _load(source_dir: Path, device: str) -> Any:
    from sentence_transformers import SentenceTransformer

    try:
        with quiet_library():
            model = SentenceTransformer(
                str(source_dir),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelFilesError(f"the embedder in {source_dir} cannot be loaded: {error}") from error
    return model.float().eval()


def _plain_tokenizer(tokenizer: Any, source_dir: Path) -> Tokenizer:
    """A copy of the model's tokenizer that neither cuts nor pads."""
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            f"the embedder in {source_dir} has no tokenizer that says where tokens lie"
        )
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain


def _prompt(model: Any, *names: str) -> str:
    """What the model wants before a text of some kind, by the first name that it knows."""
    found = (model.prompts.get(name) for name in (*names, model.default_prompt_name))
    return next((prompt for prompt in found if prompt), "")
