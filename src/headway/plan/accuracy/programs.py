"""Programs with published runs, and their documented kernels, overlap and precisions.

Facts only, nothing fitted. Sources: the projects' repositories as of 2026-08, and for older tables the commits that
wrote them. An unlisted program is assumed to be well tuned.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.plan.settings import Mesh, Recompute, Software
from headway.plan.trainer import headway_software


@dataclass(frozen=True)
class Program:
    """Documented facts of a program."""

    name: str
    """Runs of one program are fitted, or held out, together."""
    source: str
    """Text in the source column that identifies it."""
    software: Software
    zero: int = 1
    """ZeRO stage unless a row says otherwise."""
    half_attention: bool = True
    """Whether its FLOP/s count causal attention half."""
    counts_positions: bool = False
    """Whether they count learned position embeddings as a GEMM."""
    reports_reserved: bool = False
    """Whether its memory figures are reserved, not allocated, bytes."""
    recompute: Recompute | None = None
    """Documented default for rows that do not say."""
    offloads: bool = False
    """Whether it offloads or frees activations that do not fit, without recomputation."""
    interleaves: bool = True
    """Whether pipelines may be interleaved unless a row says otherwise."""


TUNED = Software(
    fusion="fused", attention="cudnn", loss="fused", reduce_bytes=4, gradient_buffers=True, weight_overlap=True
)
"""A well-tuned program: fused kernels, overlap, sequence parallelism."""

_MEGATRON_2021 = Software(
    fusion="fused", attention="unfused", loss="stepwise", dropout=True, sequence_parallel=False, weight_overlap=True,
    reduce_bytes=2, gradient_bytes=2, gradient_buffers=True, data_overlap=False,
)  # fmt: skip
_TITAN = Software(
    fusion="compiled", attention="flash2", loss="fused", reduce_bytes=4, weight_bytes=0, optimizer_passes=1.2
)

_FOUNDRY = Software(
    fusion="eager",
    attention="triton1",
    loss="fused",
    prefetch=False,
    weight_bytes=0,
    reduce_bytes=4,
    optimizer_passes=1.2,
)
_BRIDGE = replace(
    TUNED, tensor_overlap=True, reduce_bytes=2, gradient_bytes=2, gathers_low_precision=True, weight_cast_reuse=8
)
_NANOTRON = Software(
    fusion="eager", attention="flash2", loss="sharded", rotary_passes=3, reduce_bytes=4, gradient_bytes=6,
    gradient_buffers=True, bucket_bytes=25e6, tensor_overlap=True,
)  # fmt: skip
_BFLOAT16_STATES = replace(TUNED, reduce_bytes=2, gradient_bytes=2, master_bytes=0, moment_bytes=2)
_HERD = replace(TUNED, attention="flash2", tensor_overlap=True)

PROGRAMS = (
    # this trainer: `program_of` fills in compilation and devices
    Program(
        "headway", "headway", headway_software(compiled=False, autocasts=True, older=False), zero=3, interleaves=False,
    ),
    # FSDP1 without forward prefetch, gathers after a backward pass; Triton's FlashAttention-1; biases; not compiled
    Program("llm-foundry", "llm-foundry", _FOUNDRY, zero=3, half_attention=False, counts_positions=True),
    # Megatron-DeepSpeed: no flash attention, dropout, one blocking all-reduce of gradients at the end
    Program("vtrain", "vTrain", _MEGATRON_2021, zero=0, interleaves=False),
    Program("vtrain", "single-node iterations", _MEGATRON_2021, zero=0, recompute="none", interleaves=False),
    Program("megatron-a100", "calculon", _MEGATRON_2021, zero=0, interleaves=False),
    Program("megatron-a100", "llm-analysis", _MEGATRON_2021, zero=1, recompute="full", interleaves=False),
    # gradients reduced, and 8-bit weights gathered, in the GEMMs' precision; user buffers on the tensor axis
    Program("megatron-bridge", "Megatron-Bridge", _BRIDGE, recompute="none", offloads=True),
    Program("megatron-lm", "Megatron-LM", replace(TUNED, tensor_overlap=True), half_attention=False),
    Program("megatron-moe", "Megatron-MoE", TUNED),
    Program("automodel", "Automodel", _BFLOAT16_STATES, zero=3),
    Program("torchtitan", "torchtitan", _TITAN, zero=3, half_attention=False, reports_reserved=True, interleaves=False),
    Program("torchtitan", "pytorch/ao", _TITAN, zero=3, half_attention=False, reports_reserved=True, interleaves=False),
    # gradients accumulated and reduced in float32, in buckets of 25 MB; asynchronous tensor axis
    Program(
        "nanotron", "nanotron", _NANOTRON, half_attention=False, reports_reserved=True, recompute="none",
        interleaves=False,
    ),
    Program("fms-fsdp", "fms-fsdp", replace(_TITAN, reduce_bytes=2), zero=3),
    Program("llama-3", "Llama 3 Herd", _HERD, zero=3, recompute="none", offloads=True),
    Program(
        "nanochat", "nanochat", Software(fusion="compiled", attention="flash3", loss="eager"), half_attention=False,
        recompute="none",
    ),
)  # fmt: skip
"""The first program whose `source` matches applies."""

_UNKNOWN = Program("other", "", TUNED)


def program_of(line: Mapping[str, str]) -> Program:
    """The program of a row, with what the row's notes state."""
    source = line["source"]
    program = next((known for known in PROGRAMS if known.source.lower() in source.lower()), _UNKNOWN)
    software = _from_notes(program.software, line)
    if program.name == "llm-foundry" and "Large Scale" in source:
        # the later table: prefetch on, FlashAttention-2 but for the sizes that kept Triton's kernel
        triton = re.search(r"-(13|30)b", line.get("model", "").lower()) is not None
        software = replace(software, prefetch=True, attention="triton1" if triton else "flash2")
    if program.name == "headway":
        compiled, gpu = "compile" in line.get("notes", ""), line.get("gpu", "").lower()
        software = headway_software(compiled=compiled, autocasts=True, older="a100" in gpu)
        software = software.on_mesh(Mesh(), passes=2) if line.get("n_gpus") == "1" else software
    if "202412" in source:
        software = replace(software, loss="eager")  # the loss was not compiled yet
    if program.name == "megatron-bridge":
        software = _by_release(software, source, line.get("gpu", "").lower())
    return replace(program, software=software)


def _by_release(software: Software, source: str, gpu: str) -> Software:
    """Megatron-Bridge's Blackwell recipes: CUDA graphs from 26.02 on, overlapped expert all-to-all from 26.06 on."""
    match = re.search(r"\[(\d\d)\.(\d\d)", source)
    release = int(match[1]) * 100 + int(match[2]) if match else 0
    racks = gpu.startswith(("gb", "b300"))
    if racks and release >= 2606:
        return replace(software, cuda_graphs=True, expert_overlap=0.8)
    return replace(software, cuda_graphs=True) if racks and release >= 2602 else software


def _from_notes(software: Software, line: Mapping[str, str]) -> Software:
    notes, dtype = line.get("notes", "").lower(), line.get("dtype", "").lower()
    if "async tp" in notes or "asynctp" in notes:
        software = replace(software, tensor_overlap=True)
    if "mp mode=pure" in notes:
        software = replace(software, reduce_bytes=2)
    if "sequence parallel" in line.get("activation_ckpt", ""):
        software = replace(software, sequence_parallel=True)
    if "fp8 all-gather" in dtype:
        software = replace(software, gathers_low_precision=True)
    if re.search(r"fa-?3|flashattention-?3", notes):
        software = replace(software, attention="flash3")
    if "row" in dtype:
        return replace(software, scaling="row")
    if "hybrid" in dtype:
        return replace(software, scaling="delayed")
    if "mx" in dtype or "nvfp4" in dtype:
        return replace(software, scaling="block")
    return software
