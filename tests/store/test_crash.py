"""Kill -9 at any moment: what was acknowledged is there, and whatever is there is whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from chunkcache.catalog import Catalog
from chunkcache.identity import TenantNamespace
from chunkcache.store.disk import DiskTier
from chunkcache.store.entry_format import decode_header
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database

NAMESPACE = TenantNamespace(b"n" * 32)
NUM_KILLS = 12

WRITER = """
import os, sys
from pathlib import Path
import torch
from chunkcache.catalog import Catalog
from chunkcache.documents import Chunk, Document
from chunkcache.entry import Entry
from chunkcache.identity import EntryIdentity, chunk_id
from chunkcache.store.environment import StoreEnvironment

path, namespace = Path(sys.argv[1]), b"n" * 32

def document(number, version):
    ids = [(number, version, i) for i in range(3)]
    chunks = tuple(Chunk(chunk_id(namespace, b"t" * 32, x), i, i + 1, x) for i, x in enumerate(ids))
    return Document(f"{number:06}", f"{number} {version} text", {}, chunks, b"t" * 32, "fixed")

def entries(chunks):
    for chunk in chunks:
        identity = EntryIdentity(b"m" * 32, namespace, "alone", (), "bf16", chunk.token_ids)
        k = torch.full((20, 3, 2, 64), float(chunk.token_ids[0] % 100)).bfloat16()
        yield Entry(identity, identity.key(), k=k, v=-k)

def write(first):
    # Nothing but write(2) between a commit and its acknowledgement: no buffer can be lost.
    with StoreEnvironment.open(path, max_bytes=1 << 30) as env:
        catalog = Catalog(env, namespace)
        number = first
        while True:
            for version in (1, 2):
                new = document(number, version)
                catalog.put(new, entries=entries(new.chunks), now=1.0)
                os.write(1, b"put %d %d\\n" % (number, version))
            if number % 3 == 0:
                catalog.delete(f"{number:06}")
                os.write(1, b"del %d 2\\n" % number)
            number += 1

for line in sys.stdin:
    if not (pid := os.fork()):
        write(int(line))
    os.write(1, b"pid %d 0\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"end 0 0\\n")
"""


def test_kill_at_any_moment_loses_nothing_acknowledged_and_leaves_nothing_in_pieces(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, os.fspath(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    expected: dict[int, int] = {}
    for kill in range(NUM_KILLS):
        process.stdin.write(f"{1_000 * kill}\n")
        process.stdin.flush()
        victim = int(process.stdout.readline().split()[1])
        last = 1_000 * kill
        num_lines = 0
        while (line := process.stdout.readline().split())[0] != "end":
            what, last, version = line[0], int(line[1]), int(line[2])
            if what == "put":
                expected[last] = version
            else:
                del expected[last]
            num_lines += 1
            # The writer goes on meanwhile: the kill lands wherever it is by then.
            if num_lines == 1 + 2 * kill:
                os.kill(victim, signal.SIGKILL)
        found = check_store(path)
        # One operation more may have been committed, and its acknowledgement lost.
        in_flight = {last, last + 1}
        assert found.keys() ^ expected.keys() <= in_flight
        for number in found.keys() & expected.keys() - in_flight:
            assert found[number] == expected[number], number
        expected = found
    process.stdin.close()
    process.wait(60)
    process.stdout.close()
    assert process.returncode == 0
    assert len(expected) >= NUM_KILLS


def check_store(path: Path) -> dict[int, int]:
    """Assert that everything in the store is whole; returns document numbers and versions."""
    with StoreEnvironment.open(path, max_bytes=1 << 30) as env:
        catalog = Catalog(env, NAMESPACE)
        infos = catalog.list(limit=100_000)
        assert catalog.count() == len(infos)
        assert DiskTier(env).check_integrity() == []
        documents = catalog.get_many(info.document_id for info in infos)
        chunks = {c.chunk_id: c.token_ids for d in documents.values() for c in d.chunks}
        with env.read() as txn:
            assert txn.num_entries(Database.CHUNKS) == len(chunks)
            headers = [decode_header(value) for _, value in txn.scan(Database.ENTRIES)]
        assert {h.identity().token_ids for h in headers} == set(chunks.values())
        assert all(h.shape[1] == len(h.identity().token_ids) for h in headers)
        return {int(info.document_id): info.version for info in infos}
