"""Reranking with a cross-encoder of sentence-transformers, from a directory or a hub.

The library is imported when a model is loaded, not before: that takes seconds.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

from chunkcache.errors import ModelFilesError
from chunkcache.model.quiet import quiet_library
from chunkcache.short_thread import on_short_thread
from chunkcache_retriever.rerank.reranker import Candidate


class CrossEncoderReranker:
    """A cross-encoder with one output. Code and pickled weights that come with it are not loaded.

    Args:
        path_or_hub_id: A directory, or the name of a model on the hub.
        device: Torch device.

    Raises:
        ModelFilesError: It cannot be loaded, or has several outputs.
    """

    def __init__(self, path_or_hub_id: str | Path, *, device: str = "cpu") -> None:
        from sentence_transformers import CrossEncoder

        name = str(path_or_hub_id)
        try:
            with quiet_library():
                self._model = CrossEncoder(
                    name,
                    device=device,
                    trust_remote_code=False,
                    local_files_only=Path(name).expanduser().is_dir(),
                    model_kwargs={"use_safetensors": True},
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelFilesError(f"the reranker {name!r} cannot be loaded: {error}") from error
        if self._model.num_labels != 1:
            raise ModelFilesError(
                f"the reranker {name!r} has {self._model.num_labels} outputs, not one"
            )
        # The library's tokenizer cannot be used by two threads at once.
        self._lock = threading.Lock()

    def scores(self, query: str, candidates: Sequence[Candidate]) -> list[float]:
        """See :class:`~chunkcache_retriever.rerank.reranker.Reranker`: the model's outputs."""
        pairs = [(query, c.text) for c in candidates]
        with self._lock:
            found = on_short_thread(
                # Padding to a neighbour's length would change a score's last bits.
                lambda: self._model.predict(pairs, batch_size=1, show_progress_bar=False)
            )
        return [float(score) for score in found]
