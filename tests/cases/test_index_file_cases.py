"""Case test X03: files that other tools would load as an index's side files are never opened."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkcache_retriever.adapters.local_client import LocalClient
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder


class _Bomb:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self._target,)


def test_X03_a_planted_pickle_beside_the_store_is_never_run(
    open_cache: Callable[..., Any], passages: dict[str, str], tmp_path: Path
) -> None:
    """What every adapter asks, over a store whose directory somebody else has filled."""
    marker = tmp_path / "executed"
    cache = open_cache()
    folder = cache.runtime.settings.store
    cache.close()
    payload = pickle.dumps(_Bomb(marker))
    planted = [folder / name for name in ("index.pkl", "index.faiss", "docstore.pkl", "ids.json")]
    for path in planted:
        path.write_bytes(payload)
    again = open_cache()
    client = LocalClient(again, Retriever(again, FixedEmbedder()))
    for name, text in passages.items():
        client.put(name, text, {})
    assert client.search("Who keeps the key to the tower?", 1)[0].document_id in passages
    assert client.delete("tower")
    assert "tower" not in {hit.document_id for hit in client.search("tower key", 3)}
    again.close()
    assert not marker.exists()
    assert all(path.read_bytes() == payload for path in planted)
