"""Compile the Triton kernels for GPUs that need not be there; prints what they take of the chip.

Run as ``TRITON_INTERPRET=0 python -m tests.compile_triton``: a process decides once between
compiling and interpreting.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decodekit.backends.triton import kernels as triton_kernels
from decodekit.backends.triton.backend import TritonBackend
from decodekit.backends.triton.tiles import tiles
from decodekit.errors import BackendError
from decodekit.interfaces.plan import StepPlan

ARCHITECTURE = 80  # the oldest that has bfloat16, and the least memory on the chip
SHAPES = [  # dtype, R x G, D, several splits, which of the tiles
    ("bf16", 20, 128, True, (0, 1)),
    ("fp16", 484, 128, False, (0,)),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> int:
    """Return the bytes of shared memory of a kernel that has been compiled to machine code."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # As at a launch: pointers, strides and the head dim are multiples of 16, so loads run ahead.
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or "_stride_" in name or name in ("width", "chunk")
    }
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even),
        target=GPUTarget("cuda", ARCHITECTURE, 32),
        options=options,
    )
    assert len(made.asm["cubin"]) > 1000
    return int(made.metadata.shared)


def main() -> None:
    """Compile everything and print one line of JSON."""
    used: dict[str, int] = {}
    for dtype, pairs, width, split, which in SHAPES:
        types = {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "sink_ptr"), f"*{dtype}"),
            "out_ptr": "*fp32" if split else f"*{dtype}",
            "log_ptr": "*fp32",
            "times_ptr": "*i32",
            "shape_ptr": "*i32",
            "scale": "fp32",
            "softcap": "fp32",
        }
        constants = {
            **dict.fromkeys(("WINDOWED", "SOFTCAPPED", "SINKS"), True),
            "GROUPS": 4,
            "SPLIT": split,
            "WIDE": False,
            "BLOCK_D": width,
        }
        for number in which:
            tile = tiles(pairs, width, DTYPES[dtype])[number]
            blocks = {"BLOCK_M": tile.pairs, "BLOCK_N": tile.keys}
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            used[f"{dtype} {pairs} {width} tile {number}"] = compiled(
                triton_kernels.attend_kernel, types, constants | blocks, options
            )
    types = {"parts_ptr": "*fp32", "log_ptr": "*fp32", "sink_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {"SINKS": True, "BLOCK_P": 4, "BLOCK_D": 128}
    used["merge"] = compiled(triton_kernels.merge_kernel, types, constants, {"num_warps": 4})
    try:
        TritonBackend().lower(
            [StepPlan(0, (0,)).mask()],
            window=None,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        error = ""
    except BackendError as refused:
        error = str(refused)
    print(json.dumps({"shared": used, "error": error}))


if __name__ == "__main__":
    main()
