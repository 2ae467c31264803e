"""How long this process has been running, interpreter start and imports included."""

import os
import time
from pathlib import Path

_START_TIME_FIELD = 19
"""Index of ``starttime`` in ``/proc/self/stat``, counted behind the command's name."""


def seconds_since_process_start() -> float:
    """Seconds since the operating system started this process.

    Linux says when, in clock ticks since boot. Elsewhere psutil is asked; on Linux it would add a
    boot time that is rounded to a whole second.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        import psutil

        return time.time() - psutil.Process().create_time()
    started_ticks = int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
