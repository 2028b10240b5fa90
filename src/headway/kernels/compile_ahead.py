"""Ahead-of-time compilation of kernels for another chip: what would fail on a GPU fails on a laptop.

    python -m headway.kernels.compile_ahead [NAME ...]

Each kernel's file lists its launches in AHEAD. Prints the registers, spilled bytes and shared memory of each.
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

HOPPER = 90
"""Compute capability 9.0: H100, H200."""


@dataclass(frozen=True)
class LaunchSpec:
    """One launch configuration of a kernel."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Types of the non-constexpr arguments, in order: "*bf16", "*fp32", "i32", "fp32" ..."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    odd: frozenset[str] = frozenset()
    """Arguments that are not divisible by 16; a launch specializes on the others."""
    registers: int | None = None
    """Per thread, at most; None for as many as the compiler takes."""


@dataclass(frozen=True)
class CompiledKernel:
    """Resource usage of a compiled kernel."""

    name: str
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread: spilled from registers."""
    shared_bytes: int
    """Per block."""


def everything() -> Iterator[LaunchSpec]:
    """Yield every launch listed in this package."""
    for module in iter_modules(headway.kernels.__path__, "headway.kernels."):
        if module.name != __name__:
            yield from getattr(import_module(module.name), "AHEAD", ())


def compiled(spec: LaunchSpec, capability: int = HOPPER) -> CompiledKernel:
    """Compile a launch; raise what the compiler raises."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: spec.types.get(name, "constexpr") for name in spec.kernel.arg_names}
    even = [
        i
        for i, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or kind in ("i32", "i64")) and name not in spec.odd
    ]
    hints = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(spec.kernel, signature, dict(spec.constants), hints)
    options = {"num_warps": spec.warps, "num_stages": spec.stages, "maxnreg": spec.registers}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _usage(kernel.asm["cubin"])
    return CompiledKernel(spec.name, usage["REG"], usage["STACK"] + usage["LOCAL"], kernel.metadata.shared)


def _usage(binary: bytes) -> dict[str, int]:
    """Return the resource usage, as cuobjdump reads it from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        result = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    pairs = [word.split(":") for word in result.stdout.split() if word.startswith(("REG:", "STACK:", "LOCAL:"))]
    return {name: int(count) for name, count in pairs}


def main(names: list[str]) -> None:
    """Compile the named launches, or all, and print one JSON object per line."""
    if not INSTALLED:
        sys.exit("error: Triton is not installed\nhint: pip install triton")
    for spec in everything():
        if not names or spec.name in names:
            print(json.dumps(asdict(compiled(spec))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
