"""Runs tensor work that is not the engine's on a thread of its own that ends with it.

OpenMP keeps a pool of threads for every thread that has ever called it. With more of them than
cores, GNU OpenMP stops spinning at its barriers and sleeps instead, in every pool: one stray
product on another thread costs the engine several thousand wake-ups in each answer from then on.
A thread that ends takes its pool with it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def on_short_thread(task: Callable[[], Result]) -> Result:
    """Run a callable on a new thread, wait for it, and return or raise what it did."""
    with ThreadPoolExecutor(1, thread_name_prefix="short") as pool:
        return pool.submit(task).result()
