"""``chunkcache precache`` as a process that is stopped or killed, and run again."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from chunkcache.errors import StoreError
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.transaction import Database

NUM_DOCUMENTS = 120


def count_entries(store: Path) -> int:
    with (
        StoreEnvironment.open(store, max_bytes=1 << 30, read_only=True) as env,
        env.read() as txn,
    ):
        return txn.num_entries(Database.ENTRIES)


def wait_for_entries(process: "subprocess.Popen[str]", store: Path, num_entries: int) -> None:
    """Return as soon as the process has stored so many entries."""
    while process.poll() is None:
        try:
            if count_entries(store) >= num_entries:
                return
        except StoreError:
            pass  # not made yet, or in the middle of a write
        time.sleep(0.005)
    pytest.fail(f"ended before it could be stopped: {process.communicate()}")


def test_a_killed_run_is_resumed_and_equals_one_that_was_not_killed(
    start_cli, cli_json, write_documents, read_store, store: Path, tmp_path: Path
) -> None:
    """J01: the second run prefills what is missing, nothing else."""
    folder = write_documents(NUM_DOCUMENTS)
    process = start_cli("precache", folder)
    wait_for_entries(process, store, NUM_DOCUMENTS // 3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    num_kept = count_entries(store)
    assert NUM_DOCUMENTS // 3 <= num_kept < NUM_DOCUMENTS

    summary = cli_json("precache", folder)
    assert summary["documents"] == NUM_DOCUMENTS
    assert summary["prefilled_chunks"] == NUM_DOCUMENTS - num_kept

    whole = tmp_path / "whole"
    cli_json("precache", folder, "--store", whole)
    resumed, uninterrupted = read_store(store), read_store(whole)
    assert {d: x.digest for d, x in resumed[0].items()} == {
        d: x.digest for d, x in uninterrupted[0].items()
    }
    assert resumed[1] == uninterrupted[1]
    assert len(resumed[1]) == NUM_DOCUMENTS


def test_a_signal_ends_a_run_behind_the_documents_at_hand(
    start_cli, cli_json, write_documents, read_store, store: Path
) -> None:
    folder = write_documents(NUM_DOCUMENTS)
    process = start_cli("precache", folder, "--json")
    wait_for_entries(process, store, NUM_DOCUMENTS // 4)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert "stopping" in stderr
    summary = json.loads(stdout)
    assert summary["interrupted"] is True
    assert NUM_DOCUMENTS // 4 <= summary["documents"] < NUM_DOCUMENTS
    documents, entries = read_store(store)
    assert len(documents) == len(entries) == summary["documents"]
    rest = cli_json("precache", folder)
    assert rest["prefilled_chunks"] == NUM_DOCUMENTS - summary["documents"]
