"""What Triton does outside the interpreter: compile for Hopper, and refuse tensors on the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

MAX_SHARED_BYTES = 227 * 1024


def test_kernels_compile_for_sm_90_without_spills(tmp_path: Path):
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    quantise = {f"quantise_{what}_{how}" for what in ("keys", "values") for how in ("int8", "fp8")}
    place = {"place", "place_int8", "place_fp8"}
    assert set(report) == {*place, *quantise, "decode_split", "decode_merge"}
    for name, kernel in report.items():
        assert kernel["cubin_bytes"] > 0, name
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES, name
        if "resources" in kernel:
            spilled = re.findall(r"(?:STACK|LOCAL):(\d+)", kernel["resources"])
            assert spilled, kernel["resources"]
            assert all(num_bytes == "0" for num_bytes in spilled), kernel["resources"]


def test_triton_loads_only_when_asked_for_and_refuses_cpu_tensors_outside_the_interpreter():
    code = (
        "import sys, torch\n"
        "from chunkcache_kernels.attend_decode.spec import ATTEND_DECODE\n"
        "from chunkcache_kernels.implementation import use_implementation\n"
        "from chunkcache_kernels.place.spec import PLACE\n"
        "for spec in (PLACE, ATTEND_DECODE):\n"
        "    spec.check('cpu', spec.make_inputs(0), torch.float32)\n"
        "assert 'triton' not in sys.modules, 'triton was loaded'\n"
        "with use_implementation('triton'):\n"
        "    PLACE.run(PLACE.make_inputs(0))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "KernelArgumentError: Triton kernels run on cuda" in done.stderr
