"""A process that is killed while it writes vectors: the next one goes on, and finds the same."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chunkcache.catalog import Catalog
from chunkcache.store.environment import StoreEnvironment
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

NUM_DOCUMENTS = 40
SCRIPT = """
import sys
from pathlib import Path
from chunkcache.catalog import Catalog
from chunkcache.identity import TenantNamespace
from chunkcache.store.environment import StoreEnvironment
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

class Shelf:
    def __init__(self, catalog):
        self.catalog = catalog

with StoreEnvironment.open(Path(sys.argv[1]), max_bytes=1 << 30) as env:
    catalog = Catalog(env, TenantNamespace(b"n" * 32))
    tell = lambda num_done, num_chunks: print(num_done, flush=True)
    Retriever(Shelf(catalog), FixedEmbedder(), on_embedded=tell).sync()
"""


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_killed_sync_is_gone_on_with(
    shelf, env: StoreEnvironment, tmp_path: Path, num_batches: int
) -> None:
    for i in range(NUM_DOCUMENTS):
        shelf.put(f"d{i}", *(f"door {i} of house {j} is {i * j}" for j in range(8)))
    namespace = shelf.catalog.namespace
    path = tmp_path / "store"
    env.close()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(num_batches):
        assert process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with StoreEnvironment.open(path, max_bytes=1 << 30) as reopened:
        shelf.catalog = Catalog(reopened, namespace)
        resumed = Retriever(shelf, FixedEmbedder())
        report = resumed.sync()
        assert report.num_chunks == NUM_DOCUMENTS * 8
        assert report.num_loaded >= num_batches * 64
        assert report.num_loaded + report.num_embedded == NUM_DOCUMENTS * 8
        for query in ("door 3 of house 5", "house 7", "is 96"):
            again = Retriever(shelf, FixedEmbedder()).search(query, 5)
            assert [(h.chunk_id, h.score) for h in resumed.search(query, 5)] == [
                (h.chunk_id, h.score) for h in again
            ]
