"""Kill -9 at random moments of concurrent ingest, delete and query, with an oracle.

Three threads of a victim store, replace, delete and ask; it is killed whenever the dice say so.
Then another process opens the store: everything acknowledged is there, nothing is in pieces, and
every answer, the victim's own included, is the one that an undisturbed store gives.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = '''
import random, select, threading
from chunkcache.engine.sampling import SamplingParams
from chunkcache.errors import DocumentNotFoundError
from chunkcache.planning import AskOptions
from chunkcache.upkeep.verify import verify

NAMES = [f"doc-{i}" for i in range(9)]
VERSIONS = range(3)
SHARED = "The gate of the yard is shut at ten, and the porter keeps the key until the morning. "
SETTINGS = {"cache_dir": cache_dir, "chunk_tokens": 24, "preparation": "alone",
            "store_max_bytes": 1 << 30, "host_tier_bytes": 100_000, "min_fused_context_tokens": 0,
            "min_mean_chunk_tokens": 0, "pool_tokens": 4096}
DRAWN = AskOptions(sampling=SamplingParams(temperature=1.0, seed=7), max_tokens=5)
"""Drawn tokens follow the logits more closely than the most likely ones do."""


def text(name, version):
    """Versions of a document share most of their chunks, and all documents share one."""
    number = NAMES.index(name)
    own = f"House {number} has {number * 31 + 7} windows and {number * 7 + 2} doors in all. " * 2
    return own + SHARED + f"The code of its door is {(number * 3 + version) * 7919 % 10_000}."


def opened(path):
    return ChunkCache.open(path, model, **SETTINGS)


def ask(cache, name):
    return cache.answer("Which code?", [name], options=DRAWN)


def in_child(body):
    """What a child's function returns, through a pipe as JSON."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(receive)
        status = 1
        try:
            with os.fdopen(send, "w") as file:
                json.dump(body(), file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(send)
    with os.fdopen(receive) as file:
        told = file.read()
    assert os.waitpid(pid, 0)[1] == 0, "a check failed"
    return json.loads(told)


def undisturbed():
    """The answer over each version of each document."""
    answers = {}
    with opened(Path(store).parent / "undisturbed") as cache:
        for name in NAMES:
            for version in VERSIONS:
                cache.put(name, text(name, version))
                answers[f"{name}/{version}"] = ask(cache, name).token_ids
    return answers


def work(send, seed):
    """What the victim does until it is killed; one write per line, so that none is torn."""
    def log(*parts):
        os.write(send, (json.dumps(parts) + "\\n").encode())

    def change(names, dice):
        while True:
            name, version = dice.choice(names), dice.choice(VERSIONS)
            if dice.random() < 0.3:
                log("deletes", name, None)
                try:
                    cache.delete(name)
                except DocumentNotFoundError:
                    pass
                log("done", name, None)
            else:
                log("puts", name, version)
                cache.put(name, text(name, version))
                log("done", name, version)

    def question(dice):
        while True:
            name = dice.choice(NAMES)
            try:
                answer = ask(cache, name)
            except DocumentNotFoundError:
                continue
            log("asked", name, answer.token_ids, answer.report.documents[0].source)

    log("opens", None, None)
    cache = opened(store)
    dice = [random.Random(f"{seed}/{i}") for i in range(3)]
    jobs = [(change, NAMES[::2], dice[0]), (change, NAMES[1::2], dice[1]), (question, dice[2])]

    def run(job):
        try:
            job[0](*job[1:])
        except BaseException as error:
            log("failed", traceback.format_exc(), None)
            os._exit(1)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    threads[0].join()


def kill_one(dice, seed):
    """Run a victim, kill it, and give the lines that it wrote."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(receive)
        work(send, seed)
        os._exit(1)
    os.close(send)
    num_lines = dice.choice((1, dice.randrange(2, 12), dice.randrange(2, 100)))
    with os.fdopen(receive, "rb", buffering=0) as file:
        data = b""
        while data.count(b"\\n") < num_lines:
            assert select.select([receive], [], [], 120)[0], "the victim hangs: " + data.decode()
            piece = os.read(receive, 65_536)
            assert piece, data.decode()
            data += piece
        time.sleep(dice.random() * (0.15 if num_lines == 1 else 0.02))
        os.kill(pid, signal.SIGKILL)
        while piece := os.read(receive, 65_536):
            data += piece
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, data.decode()
    return [json.loads(line) for line in data.splitlines()]


def check(state, pending):
    """Look at the store as the next process would; gives what is there now."""
    found, num_hits = {}, 0
    with opened(store) as cache:
        report = verify(cache.runtime.env)
        assert report.findings == (), report.findings
        listed = {info.document_id for info in cache.list()}
        assert cache.catalog.count() == len(listed)
        for name in NAMES:
            allowed = {state.get(name), *pending.get(name, ())}
            if name not in listed:
                assert None in allowed, (name, state, pending)
                continue
            stored = cache.get(name)
            versions = [v for v in VERSIONS if text(name, v) == stored.text]
            assert versions and versions[0] in allowed, (name, versions, state, pending)
            found[name] = versions[0]
            answer = ask(cache, name)
            assert list(answer.token_ids) == expected[f"{name}/{versions[0]}"], name
            num_hits += answer.report.documents[0].source == "disk"
        assert verify(cache.runtime.env).findings == ()
        cache.runtime.stack.check_integrity()
    return [found, num_hits]


expected = in_child(undisturbed)
dice = random.Random(seed)
state, counts = {}, {"kills": 0, "acknowledged": 0, "answers": 0, "hits": 0}
for number in range(num_kills):
    pending, held = {}, {name: {version} for name, version in state.items()}
    for what, name, value, *rest in kill_one(dice, f"{seed}/{number}"):
        if what in ("puts", "deletes"):
            pending[name] = [value]
            held.setdefault(name, set()).add(value)
        elif what == "done":
            state[name] = value
            del pending[name]
            counts["acknowledged"] += 1
        elif what == "asked":
            # Asked while it was being replaced: of one of its versions, never of a mixture.
            could = [expected[f"{name}/{v}"] for v in VERSIONS if v in held.get(name, ())]
            assert value in could, (name, value, could)
            counts["answers"] += 1
            counts["hits"] += rest[0] != "computed"
        else:
            assert what == "opens", (what, name)
    state, num_hits = in_child(lambda: check(state, pending))
    counts["kills"] += 1
    counts["answers"] += len(state)
    counts["hits"] += num_hits
counts["distinct answers"] = len({tuple(a) for a in expected.values()})
print(json.dumps(counts))
'''


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("num_kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_L13_killed_at_random_under_load(
    run_child: Callable[..., str],
    model_dir: Callable[..., Path],
    cache_dir: Path,
    tmp_path: Path,
    num_kills: int,
) -> None:
    """No wrong answer, no acknowledged document lost, no store that cannot be read."""
    output = run_child(
        SCRIPT,
        store=tmp_path / "store",
        model=model_dir(),
        cache_dir=cache_dir,
        num_kills=num_kills,
        seed=20_260,
    )
    counts: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(counts)
    assert counts["kills"] == num_kills
    assert counts["acknowledged"] > 0
    assert counts["hits"] > num_kills
    assert counts["distinct answers"] > 18, "of 27 answers too few differ to tell one from another"
