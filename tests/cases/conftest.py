"""What the case tests share: model directories with one thing changed, and warm child processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

CHILD_HASH_SEED = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
"""Never this process's own."""

_SERVER = '''
import json, os, signal, sys, time, traceback
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama

torch.set_num_threads(1)
from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import ChunkCacheError
from chunkcache.precache import TextItem
from chunkcache.store.environment import StoreEnvironment


def killed_after(num_reports, body):
    """Run ``body(report)`` in a child and kill it once it has reported so often."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        body(lambda: os.write(send, b"."))
        os._exit(0)
    os.close(send)
    for _ in range(num_reports):
        assert os.read(receive, 1), "the child ended before it could be killed"
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(receive)


for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        status = 1
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        try:
            exec(job["script"], globals() | job["values"])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitpid(pid, 0)[1], flush=True)
'''

RunChild = Callable[..., str]
ChangeModel = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are done before a second thread has woken up, the more so on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def run_child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunChild]:
    """Runs scripts in fresh processes, forked from one that has imported everything already.

    A keyword argument is a global of the script. What it prints comes back; it must end well.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "PYTHONHASHSEED": CHILD_HASH_SEED,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    folder = tmp_path_factory.mktemp("children")
    num_jobs = 0

    def run(script: str, **values: Any) -> str:
        nonlocal num_jobs
        num_jobs += 1
        output = folder / str(num_jobs)
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        job = json.dumps({"script": script, "values": plain, "output": str(output)})
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(job + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        text = output.read_text()
        assert status == 0, f"status {status}:\n{text}"
        return text

    yield run
    server.stdin.close()
    assert server.wait(60) == 0
    server.stdout.close()


@pytest.fixture
def open_cache(open_cache: Callable[..., Any]) -> Callable[..., Any]:
    """As the shared one, with chunks prefilled alone: the preamble is most of a tiny chunk's time."""

    def make(*arguments: Any, **settings: Any) -> Any:
        return open_cache(*arguments, **({"preparation": "alone"} | settings))

    return make


@pytest.fixture
def change_model(model_dir: Callable[..., Path], tmp_path: Path) -> ChangeModel:
    """Copies a tiny model's directory with JSON files changed."""

    def change(
        name: str,
        *,
        source: Path | None = None,
        **edits: Callable[[dict[str, Any]], None],
    ) -> Path:
        """Apply ``edits``, by file name without its suffix, to the copy."""
        target = tmp_path / name
        shutil.copytree(source or model_dir(), target)
        for file_name, edit in edits.items():
            path = target / f"{file_name}.json"
            content = json.loads(path.read_text(encoding="utf-8"))
            edit(content)
            path.write_text(json.dumps(content), encoding="utf-8")
        return target

    return change


@pytest.fixture
def entry_bytes() -> Callable[[Any], dict[bytes, bytes]]:
    """Every stored entry of a cache's store, as bytes."""
    from chunkcache.store.transaction import Database

    def read(cache: Any) -> dict[bytes, bytes]:
        with cache.runtime.env.read() as txn:
            return {key: bytes(value) for key, value in txn.scan(Database.ENTRIES)}

    return read


@pytest.fixture(scope="session")
def library_answer() -> Callable[[Any, tuple[int, ...], int], tuple[int, ...]]:
    """The library's own greedy answer to token ids, by an open cache's model."""

    def generate(cache: Any, token_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        ids = torch.tensor([token_ids])
        model = cache.runtime.model.runner.hf_model
        generated = model.generate(
            ids,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            attention_mask=torch.ones_like(ids),
        )
        return tuple(generated[0, ids.shape[1] :].tolist())

    return generate
