"""Compile kernels for a chip that is not here: what would fail on a GPU fails on a laptop.

    python -m headway.kernels.compile_ahead [NAME ...]

Each kernel's file lists under AHEAD how it is launched. Prints registers, spilled bytes and shared memory of each.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import headway.kernels
from headway.kernels.triton_compat import INSTALLED, triton

__all__ = ["CompiledKernel", "LaunchSpec", "compiled", "everything"]

HOPPER = 90
"""Compute capability 9.0: H100, H200."""


@dataclass(frozen=True)
class LaunchSpec:
    """One way in which a kernel is launched."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Of each argument that is no constant, in its order: "*bf16", "*fp32", "i32", "fp32" ..."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    odd: frozenset[str] = frozenset()
    """Arguments that are not multiples of 16, which a launch would tell the compiler of all others."""


@dataclass(frozen=True)
class CompiledKernel:
    """What a kernel takes of a multiprocessor."""

    name: str
    registers: int
    """Of each thread."""
    spilled_bytes: int
    """Of each thread: what did not fit into registers."""
    shared_bytes: int
    """Of each block."""


def everything() -> Iterator[LaunchSpec]:
    """Every launch that a file of this package lists."""
    for module in iter_modules(headway.kernels.__path__, "headway.kernels."):
        if module.name != __name__:
            yield from getattr(import_module(module.name), "AHEAD", ())


def compiled(one: LaunchSpec, capability: int = HOPPER) -> CompiledKernel:
    """Compile one; raises what the compiler raises."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: one.types.get(name, "constexpr") for name in one.kernel.arg_names}
    even = [
        i
        for i, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or kind in ("i32", "i64")) and name not in one.odd
    ]
    hints = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(one.kernel, signature, dict(one.constants), hints)
    options = {"num_warps": one.warps, "num_stages": one.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _usage(made.asm["cubin"])
    return CompiledKernel(one.name, usage["REG"], usage["STACK"] + usage["LOCAL"], made.metadata.shared)


def _usage(binary: bytes) -> dict[str, int]:
    """What the compiler reserved, as its own tool reads it off the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    pairs = [word.split(":") for word in told.stdout.split() if word.startswith(("REG:", "STACK:", "LOCAL:"))]
    return {name: int(count) for name, count in pairs}


def main(names: list[str]) -> None:
    """Compile those of these names, or all, and print one JSON object a line."""
    if not INSTALLED:
        sys.exit("error: Triton is not installed\nhint: pip install triton")
    for one in everything():
        if not names or one.name in names:
            print(json.dumps(asdict(compiled(one))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
