"""Compiles every Triton kernel for sm_90 without a GPU and prints what came out, as JSON.

A script, not a test: it must run in a process where Triton is not set to interpret.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunkcache_kernels.attend_decode.triton_kernel import decode_merge_kernel, decode_split_kernel
from chunkcache_kernels.place.triton_kernel import place_kernel
from chunkcache_kernels.quantise.triton_kernel import quantise_keys_kernel, quantise_values_kernel

HOPPER = GPUTarget("cuda", 90, 32)
SHAPE = {"HEAD_DIM": 128, "BLOCK_DIM": 128}
SPLIT = {"SPLIT_TOKENS": 512, "TILE_TOKENS": 64}


def _place(
    stored: str, group_tokens: int, *, interleaved: bool = False, rotary_dims: int = 128
) -> Any:
    return (
        place_kernel,
        {
            "k_ptr": stored,
            "v_ptr": stored,
            "k_pages_ptr": "*bf16",
            "v_pages_ptr": "*bf16",
            "rope_table_ptr": "*i32",
            "slots_ptr": "*i64",
        },
        {
            **SHAPE,
            "NUM_HEADS": 8,
            "ROTARY_DIMS": rotary_dims,
            "INTERLEAVED": interleaved,
            "GROUP_TOKENS": group_tokens,
            "BLOCK_ROWS": 32,
            "BLOCK_HALF": rotary_dims // 2,
            "BLOCK_REST": max(128 - rotary_dims, 1),
        },
    )


def _quantise(kernel: Any, stored: str, largest: float) -> Any:
    source = "k_ptr" if kernel is quantise_keys_kernel else "v_ptr"
    shape: dict[str, Any] = {"HEAD_DIM": 128, "LARGEST": largest, "IS_INT": stored == "*i8"}
    if kernel is quantise_keys_kernel:
        shape |= {"NUM_CHANNELS": 1024, "GROUP_TOKENS": 64, "BLOCK_TOKENS": 64}
        shape |= {"BLOCK_CHANNELS": 64}
    else:
        shape |= {"NUM_HEADS": 8, "BLOCK_ROWS": 32, "BLOCK_DIM": 128}
    return kernel, {source: "*bf16", "out_ptr": stored}, shape


KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "place": _place("*bf16", 0),
    "place_int8": _place("*i8", 64),
    "place_fp8": _place("*fp8e4nv", 64, interleaved=True, rotary_dims=64),
    "quantise_keys_int8": _quantise(quantise_keys_kernel, "*i8", 127.0),
    "quantise_keys_fp8": _quantise(quantise_keys_kernel, "*fp8e4nv", 448.0),
    "quantise_values_int8": _quantise(quantise_values_kernel, "*i8", 127.0),
    "quantise_values_fp8": _quantise(quantise_values_kernel, "*fp8e4nv", 448.0),
    "decode_split": (
        decode_split_kernel,
        {
            "q_ptr": "*bf16",
            "k_pages_ptr": "*bf16",
            "v_pages_ptr": "*bf16",
            "tables_ptr": "*i32",
            "lengths_ptr": "*i64",
            "scale": "fp32",
            "softcap": "fp32",
        },
        {
            **SHAPE,
            **SPLIT,
            "NUM_KV_HEADS": 8,
            "GROUP": 4,
            "PAGE_TOKENS": 16,
            "SOFTCAP": True,
            "WIDEN": False,
            "BLOCK_GROUP": 16,
        },
    ),
    "decode_merge": (
        decode_merge_kernel,
        {"lengths_ptr": "*i64", "out_ptr": "*bf16"},
        {**SHAPE, "NUM_QUERY_HEADS": 32, "SPLIT_TOKENS": 512},
    ),
}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """Compile one kernel; pointers are fp32 and integers i32 unless ``types`` says more.

    Pointers and strides are declared multiples of 16, as they are at a launch.
    """
    default = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature = {**default, **types, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or "stride_" in name
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=HOPPER)


def main() -> None:
    """Print one JSON object: for each kernel its cubin size, shared memory and resource usage."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(cuobjdump) if cuobjdump.exists() else shutil.which("cuobjdump")
    report = {}
    for name, (kernel, types, constants) in KERNELS.items():
        binary = compiled(kernel, types, constants)
        cubin = binary.asm["cubin"]
        report[name] = {"cubin_bytes": len(cubin), "shared_bytes": binary.metadata.shared}
        if found is not None:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(cubin)
                file.flush()
                shown = subprocess.run(
                    [found, "-res-usage", file.name], capture_output=True, text=True, check=True
                )
            report[name]["resources"] = shown.stdout + shown.stderr
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
