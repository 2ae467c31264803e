"""The environment with other processes about: growing, dying, forking, a disk that is full.

The other processes run short scripts. Those that are started in numbers are forked before they
open anything.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkcache.errors import StoreError
from chunkcache.store.environment import INITIAL_MAP_BYTES, StoreEnvironment
from chunkcache.store.transaction import Database

MAX_BYTES = 1 << 30
ENTRIES = Database.ENTRIES

PRELUDE = """
import os, signal, sys
from pathlib import Path
from chunkcache.errors import StoreError, StoreFullError
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database
path = Path(sys.argv[1])
ENTRIES = Database.ENTRIES

def open_store(max_bytes=1 << 30, **options):
    return StoreEnvironment.open(path, max_bytes=max_bytes, **options)

def put(env, key, value):
    env.update(lambda txn: txn.put(ENTRIES, key, value))
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(script: str, *arguments: object) -> str:
    process = start(script, *arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, (process.returncode, output)
    return output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_store(path):
    return StoreEnvironment.open(path, max_bytes=MAX_BYTES)


def put(env, key, value):
    env.update(lambda txn: txn.put(ENTRIES, key, value))


def get(env, key):
    with env.read() as txn:
        value = txn.get(ENTRIES, key)
        return None if value is None else bytes(value)


def test_two_processes_fill_and_grow_one_store(path):
    script = """
children = []
for name in b"a", b"b":
    if not (pid := os.fork()):
        with open_store() as env:
            for i in range(20):
                put(env, name + b"%d" % i, name * 3_000_000)
            print(env.map_bytes)
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""
    run(script, path)
    with open_store(path) as env:
        assert env.map_bytes >= 120_000_000
        for name in (b"a", b"b"):
            for i in range(20):
                assert get(env, name + b"%d" % i) == name * 3_000_000


def test_a_process_follows_a_map_that_another_one_grew(path):
    with open_store(path) as env:
        put(env, b"mine", b"1")
        run("with open_store() as env:\n    put(env, b'theirs', b'2' * 80_000_000)\n", path)
        assert env.map_bytes == INITIAL_MAP_BYTES
        assert get(env, b"theirs") == b"2" * 80_000_000
        assert env.map_bytes > 80_000_000
        run("with open_store() as env:\n    put(env, b'more', b'3' * 100_000_000)\n", path)
        put(env, b"mine", b"4")
        assert get(env, b"mine") == b"4"


def test_processes_that_make_a_store_at_once_agree(path):
    script = """
children = []
for _ in range(6):
    if not (pid := os.fork()):
        with open_store() as env:
            put(env, b"%d" % os.getpid(), env.secret)
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""
    run(script, path)
    with open_store(path) as env, env.read() as txn:
        assert [bytes(v) for _, v in txn.scan(ENTRIES)] == [env.secret] * 6
    assert sorted(os.listdir(path)) == ["data.mdb", "lock.mdb", "secret.key"]


def test_readers_that_were_killed_leave_room_for_others(path):
    open_store(path).close()
    script = """
for _ in range(150):
    receive, send = os.pipe()
    if not (pid := os.fork()):
        env = open_store()
        with env.read():
            os.write(send, b"!")
            signal.pause()
    os.read(receive, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(receive), os.close(send)
"""
    run(script, path)
    with open_store(path) as env:
        put(env, b"k", b"v")
        assert get(env, b"k") == b"v"
        # One slot is this process's own.
        assert env._lmdb().readers().count("\n") <= 2


def test_a_writer_that_was_killed_does_not_hold_the_lock(path):
    with open_store(path) as env:
        put(env, b"k", b"before")
    script = """
env = open_store()
with env.write() as txn:
    txn.put(ENTRIES, b"k", b"half done")
    print("!", flush=True)
    signal.pause()
"""
    process = start(script, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "!\n"
    process.kill()
    process.communicate()
    with open_store(path) as env:
        assert get(env, b"k") == b"before"
        put(env, b"k", b"after")
        assert get(env, b"k") == b"after"


def test_a_fork_must_open_its_own(path):
    script = """
env = open_store()
put(env, b"k", b"v")
if not os.fork():
    for use in (lambda: env.read().__enter__(), lambda: put(env, b"k", b"w"), lambda: env.map_bytes):
        try:
            use()
        except StoreError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
    env.close()
    os._exit(0)
assert os.wait()[1] == 0
put(env, b"k", b"w")
with env.read() as txn:
    assert bytes(txn.get(ENTRIES, b"k")) == b"w"
env.close()
"""
    run(script, path)


def test_a_disk_without_room_refuses_the_write_and_serves_the_rest(path):
    script = """
import resource
env = open_store()
put(env, b"before", b"x" * 1_000_000)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, hard))
num_stored = 0
for attempt in range(2):
    try:
        while True:
            put(env, b"%d" % num_stored, b"y" * 700_000)
            num_stored += 1
    except StoreFullError as error:
        assert "no room" in str(error), error
assert 5 < num_stored < 20, num_stored
with env.read() as txn:
    assert txn.num_entries(ENTRIES) == num_stored + 1
    assert all(bytes(value[:1]) in b"xy" and len(set(bytes(value))) == 1
               for _, value in txn.scan(ENTRIES))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
put(env, b"after", b"z" * 1_000_000)
with env.read() as txn:
    assert len(txn.get(ENTRIES, b"after")) == 1_000_000
env.close()
with open_store() as env, env.read() as txn:
    assert txn.num_entries(ENTRIES) == num_stored + 2
"""
    run(script, path)


def test_a_store_that_cannot_be_made_for_want_of_room_says_so(path):
    script = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
try:
    open_store()
except StoreFullError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    open_store().close()
    print("made")
"""
    assert run(script, path) == "made\n"


def test_readers_in_other_processes_see_whole_transactions(path):
    script = """
env = open_store(read_only=True)
print("!", flush=True)
last = -1
while last < 99:
    with env.read() as txn:
        values = {bytes(value) for _, value in txn.scan(ENTRIES)}
    assert len(values) == 1, values
    current = int(values.pop())
    assert current >= last
    last = current
"""
    with open_store(path) as env:

        def write(number):
            env.update(lambda txn: [txn.put(ENTRIES, b"%d" % i, b"%d" % number) for i in range(20)])

        write(0)
        process = start(script, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "!\n"
        for number in range(1, 100):
            write(number)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_a_store_that_another_process_reads_can_be_opened_and_closed_again(path):
    script = "env = open_store()\nprint('!', flush=True)\nsys.stdin.read()\nenv.close()\n"
    with open_store(path) as env:
        put(env, b"k", b"v")
    process = start(script, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "!\n"
    for _ in range(3):
        with open_store(path) as env:
            assert get(env, b"k") == b"v"
            with pytest.raises(StoreError):
                open_store(path)
    process.communicate(timeout=60)
    assert process.returncode == 0
