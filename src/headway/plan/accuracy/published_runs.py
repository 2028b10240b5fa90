"""Reads published training runs: a row of a table becomes an architecture, settings and a cluster.

What a row leaves out comes from its notes, then from the program's documentation (`programs.py`), then from a rule.
Rules for the microbatch, interleaving or recomputation are recorded, so that such rows can be scored separately. A row
that no rule can complete is skipped with a reason.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.hardware import Cluster, default_cluster, known_chip
from headway.hardware.chips import GIB, G, T
from headway.plan.accuracy.programs import Program, program_of
from headway.plan.architecture import Architecture, ExpertShape, LatentAttention
from headway.plan.costs import CostModel, make_cost_model
from headway.plan.estimate import estimate
from headway.plan.flops import flops_per_token, flops_per_token_full_attention, parameters
from headway.plan.memory import memory
from headway.plan.settings import Mesh, Recompute, Settings

Line = Mapping[str, str]

RUN_COLUMNS = ("source", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus")
"""Required columns of a table of training runs."""
ITERATION_COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
)  # fmt: skip
"""Required columns of a table of single-node iterations."""


MOST = 1e9
"""Larger numbers are invalid."""
MOST_TOKENS = 16 * 1024
"""Most tokens of an assumed microbatch."""


class UnmodelledRun(Exception):
    """A row that cannot be modelled, and why."""


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    row: int
    source: str
    program: str
    """Runs of one program are fitted, or held out, together."""
    chip: str
    architecture: Architecture
    settings: Settings
    cluster: Cluster
    tokens_s: float
    """Measured, per device."""
    memory_bytes: float | None
    reserved: bool
    """Whether the memory is reserved, not allocated, bytes."""
    assumed: tuple[str, ...]
    """Rules that replaced a missing microbatch, interleaving or recomputation."""

    @property
    def dense(self) -> bool:
        """Whether it has no experts."""
        return self.architecture.experts is None

    @property
    def seconds(self) -> float:
        """Measured step time."""
        return self.settings.batch * self.settings.seq / (self.tokens_s * self.settings.mesh.devices)


def read_case(row: int, line: Line) -> PublishedRun:
    """Read a row of a table of training runs; raise UnmodelledRun with the missing column."""
    program = program_of(line)
    for column in ("layers", "hidden", "heads", "seq_len", "n_gpus"):
        if not line.get(column):
            raise UnmodelledRun(f"column {column} is missing")
    arch = _architecture(line)
    cluster = _cluster(line)
    assumed: list[str] = []
    settings = _settings(line, program, arch, cluster, assumed)
    tokens = _tokens_s(line, program, arch, settings, cluster)
    memory_gb = _number(line, "mem_gb")
    return PublishedRun(row, line["source"], program.name, cluster.chip.name, arch, settings, cluster, tokens,
                memory_gb * GIB if memory_gb else None, program.reports_reserved, tuple(assumed))  # fmt: skip


def read_iteration(row: int, line: Line) -> PublishedRun:
    """Read a row of a table of GPT iterations on one A100 node: Megatron's model, fp16, no recomputation.

    The table does not state recomputation, but with it the GEMMs of the largest models would exceed the chip's peak.
    """
    try:
        devices, batch, micro, dim, heads, layers, seq, tensor, data, stages = (
            int(line[name]) for name in ITERATION_COLUMNS[:-1]
        )
        seconds = float(line[ITERATION_COLUMNS[-1]]) / 1e3
    except (KeyError, ValueError) as error:
        raise UnmodelledRun(f"a column is missing or not a number: {error}") from None
    numbers = (devices, batch, micro, dim, heads, layers, seq, tensor, data, stages, seconds)
    if not all(0 < number < MOST for number in numbers):
        raise UnmodelledRun("a column is not a positive number")
    if tensor * data * stages != devices:
        raise UnmodelledRun(f"tp {tensor} x dp {data} x pp {stages} is not {devices} GPUs")
    arch = Architecture(
        layers, dim, heads, heads, dim // heads, 4 * dim, 50304, gated=False, rotary=False, positions=seq,
        layer_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True,
    )  # fmt: skip
    program = program_of({"source": "single-node iterations"})
    settings = Settings(
        Mesh(shard=data, tensor=tensor, pipeline=stages), seq, micro, batch, zero=0, software=program.software
    )
    cluster = default_cluster(known_chip("a100"), devices, 1)
    return PublishedRun(
        row,
        program.source,
        program.name,
        "a100",
        arch,
        settings,
        cluster,
        batch * seq / seconds / devices,
        None,
        False,
        (),
    )


def _number(line: Line, column: str) -> float | None:
    text = (line.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < MOST:
        raise UnmodelledRun(f"column {column}: expected a positive number, got {text!r}")
    return value


def _integer(line: Line, column: str, default: int) -> int:
    value = _number(line, column)
    return default if value is None else max(1, round(value))


# -- the model


def _architecture(line: Line) -> Architecture:
    layers, dim, heads = (_integer(line, column, 0) for column in ("layers", "hidden", "heads"))
    name, moe = line.get("model", "").lower(), line.get("moe", "")
    if "next" in name or "mamba" in name:
        raise UnmodelledRun("layers without attention")
    experts = _experts(moe)
    latent = LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128) if "MLA" in moe else None
    qwen3 = "qwen3" in name
    base = Architecture(
        layers, dim, heads,
        kv_heads=_integer(line, "kv_heads", heads),
        head_dim=192 if latent else 128 if qwen3 else dim // heads,
        hidden=_integer(line, "ffn", 4 * dim),
        vocab=_integer(line, "vocab", _vocabulary(name, latent is not None)),
        qk_norm=qwen3, latent=latent,
    )  # fmt: skip
    if experts is not None:
        return replace(base, tied=False, experts=replace(experts, shared=1 if latent else 0))
    return _closest_variant(line, base)


def _vocabulary(name: str, latent: bool) -> int:
    """Default vocabulary: that of the public model, or GPT-2's, padded."""
    if "kimi" in name:
        return 163840
    if latent:
        return 129280
    return 151936 if "qwen3" in name else 65536 if "nanochat" in name else 51200


def _experts(text: str) -> ExpertShape | None:
    if not text:
        return None
    match = re.match(r"(\d+)/(\d+) \(moe_ffn (\d+)(?:; (\d+) dense)?", text)
    if not match:
        raise UnmodelledRun(f"column moe: cannot parse {text!r}")
    count, top, hidden, dense = (int(part or 0) for part in match.groups())
    return ExpertShape(count, top, hidden, dense_layers=dense)


def _closest_variant(line: Line, base: Architecture) -> Architecture:
    """Llama's or GPT's shape, tied or not: the variant closest to the published number of parameters."""
    seq = _integer(line, "seq_len", 0)
    gpt = replace(
        base, gated=False, rotary=False, positions=seq, layer_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True
    )
    if "mpt" in line.get("model", "").lower():
        return gpt
    variants = [replace(variant, tied=tied) for variant in (base, gpt) for tied in (True, False)]
    published = _number(line, "params_b")
    if published is None:
        return variants[2] if base.hidden == 4 * base.dim else variants[1]
    return min(variants, key=lambda variant: abs(parameters(variant) / (published * 1e9) - 1))


# -- the cluster

_CHIPS = ("gb300", "gb200", "b300", "b200", "h200", "h100", "mi300x", "a100")


def _cluster(line: Line) -> Cluster:
    text = line["gpu"].lower().replace("_", " ")
    name = next((name for name in _CHIPS if name in text), None)
    if name is None or "sic" in text:
        raise UnmodelledRun(f"column gpu: {line['gpu']}")
    chip = known_chip("a100-40" if name == "a100" and "40" in text else name)
    size = re.search(r"(\d+)\s*gb", text)
    if name == "h100" and size and int(size[1]) > 80:
        chip = replace(chip, memory_bytes=int(size[1]) * GIB)
    notes = f"{line.get('notes', '')} {line['source']}"
    bandwidth = re.search(r"HBM\S* ([\d.]+)TB/s", notes)
    if bandwidth:
        chip = replace(chip, bandwidth_bytes_s=float(bandwidth[1]) * T)
    watts = re.search(r"(\d+)\s*w\b", text)
    count = _integer(line, "n_gpus", 0)
    per_node = min(4 if name.startswith("gb") else 8, count)
    cluster = default_cluster(chip, per_node, -(-count // per_node))
    port = _port_bandwidth(notes, line["gpu"], per_node)
    if port is not None:
        levels = (
            level if level.name in ("nvlink", "xgmi", "pcie") else replace(level, bandwidth_bytes_s=port)
            for level in cluster.levels
        )
        cluster = replace(cluster, levels=tuple(levels))
    return replace(cluster, power_limit_w=float(watts[1]) if watts else None)


def _port_bandwidth(notes: str, gpu: str, per_node: int) -> float | None:
    """Network bytes per second and device, if the notes state them per device or node."""
    for_chip = re.search(rf"{re.escape(gpu[:4])}: (\d+)\s*Gb(?:ps|/s)", notes)
    match = for_chip or re.search(r"(\d+)\s*Gb(?:ps|/s)(/GPU)?", notes)
    if not match:
        return None
    per_gpu = match is not for_chip and match[2]
    return float(match[1]) / 8 * G / (1 if per_gpu else per_node)


# -- the settings


def _settings(line: Line, program: Program, arch: Architecture, cluster: Cluster, assumed: list[str]) -> Settings:
    mesh = _mesh(line, arch)
    batch, micro = _batch(line, mesh)
    precision = _precision(line.get("dtype", ""))
    zero, keeps = _zero(line.get("fsdp_zero_stage", ""), program)
    settings = Settings(
        mesh, _integer(line, "seq_len", 0), micro, batch, zero=zero, keeps_weights=keeps, precision=precision,
        software=program.software, frozen="LoRA" in f"{line.get('notes', '')} {line['source']}",
    )  # fmt: skip
    if not micro:
        settings = replace(settings, microbatch=_microbatch(arch, replace(settings, microbatch=1), cluster))
        assumed.append(f"micro_batch = {settings.microbatch}")
    settings = _with_interleaving(line, program, arch, settings, assumed)
    if zero < 3 and _weights_and_gradients(arch, settings, cluster) > 0.8 * cluster.chip.memory_bytes:
        settings = replace(settings, zero=3)
        assumed.append("data ranks shard weights, which do not fit otherwise")
    return _with_recompute(line, program, arch, settings, cluster, assumed)


def _weights_and_gradients(arch: Architecture, settings: Settings, cluster: Cluster) -> float:
    peak = memory(arch, settings, cluster)
    return peak.weights + peak.gradients


def _mesh(line: Line, arch: Architecture) -> Mesh:
    if not line.get("tp") and not line.get("dp"):
        raise UnmodelledRun("columns tp and dp are missing")
    count = _integer(line, "n_gpus", 0)
    tensor, pipeline, context = (_integer(line, column, 1) for column in ("tp", "pp", "cp"))
    data = _integer(line, "dp", max(1, count // (tensor * pipeline * context)))
    expert = _integer(line, "ep", 1) if arch.experts else 1
    mesh = Mesh(shard=data, tensor=tensor, pipeline=pipeline, context=context, expert=expert)
    if mesh.devices != count:
        raise UnmodelledRun(f"dp {data} x tp {tensor} x pp {pipeline} x cp {context} is not n_gpus {count}")
    return mesh


def _batch(line: Line, mesh: Mesh) -> tuple[int, int]:
    """Sequences per step and per microbatch; 0 if unknown."""
    notes = line.get("notes", "")
    batch, micro = _integer(line, "global_batch_seqs", 0), _integer(line, "micro_batch", 0)
    passes = re.search(r"(?:grad_accum|GA|GAS)[ =](\d+)", notes)
    tokens = re.search(r"total batch (\d+) tokens", notes)
    if not batch and tokens:
        batch = int(tokens[1]) // _integer(line, "seq_len", 1)
    if not batch and not micro:
        raise UnmodelledRun("columns micro_batch and global_batch_seqs are missing")
    if not micro and passes:
        micro = max(1, batch // (mesh.data * int(passes[1])))
    if not micro and "local batch" in notes and mesh.pipeline > 1:
        micro = 1  # torchtitan's pipelines split a local batch into microbatches of one sequence
    return batch or micro * mesh.data * (int(passes[1]) if passes else 1), micro


def _microbatch(arch: Architecture, settings: Settings, cluster: Cluster) -> int:
    """Default microbatch: the largest of 4, 2 and 1 that fits, up to 16k tokens and half a pipeline's supply.

    An interleaved pipeline holds up to 1.5 times as many microbatches as it has stages.
    """
    share, held = settings.batch // settings.mesh.data, 1.5 * settings.mesh.pipeline
    for size in (4, 2):
        trial = replace(settings, microbatch=size)
        enough = share // size >= (2 * settings.mesh.pipeline if settings.mesh.pipeline > 1 else 1)
        if (
            share % size == 0
            and enough
            and size * settings.seq <= MOST_TOKENS
            and memory(arch, trial, cluster, held).fits
        ):
            return size
    return 1


def _precision(text: str) -> str:
    text = text.lower()
    if "nvfp4" in text:
        return "nvfp4"
    return "mxfp8" if text.startswith(("mxfp8", "fp8-mx")) else "fp8" if "fp8" in text else "bf16"


def _zero(text: str, program: Program) -> tuple[int, bool]:
    """The ZeRO stage, and whether weights stay gathered between the passes."""
    text = text.lower()
    if "shard_grad_op" in text:
        return 3, True
    if "fsdp" in text:
        return 3, False
    match = re.search(r"zero-?(\d)", text)
    if match:
        return int(match[1]), False
    return (1 if "distributed optimizer" in text else program.zero), False


def _with_interleaving(
    line: Line, program: Program, arch: Architecture, settings: Settings, assumed: list[str]
) -> Settings:
    """With the stated chunks, or else the most that leave two layers per chunk if the program interleaves."""
    mesh, notes = settings.mesh, line.get("notes", "")
    if mesh.pipeline == 1:
        return settings
    stated = re.search(r"(?:VPP?|interleave)=(\d+|n/a)", notes)
    chunks = 1
    if stated:
        chunks = int(stated[1]) if stated[1].isdecimal() else 1
    elif not program.interleaves and "1F1B" not in notes:
        assumed.append("interleaving = 1, as documented")
    elif "1F1B" not in notes:
        per_stage = -(-arch.layers // mesh.pipeline)
        chunks = max(v for v in range(1, 9) if v == 1 or per_stage // v >= 2)
        assumed.append(f"interleaving = {chunks}")
    if settings.microbatches % mesh.pipeline or mesh.pipeline * chunks > arch.layers + 2:
        chunks = 1
    return replace(settings, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")


def _with_recompute(
    line: Line, program: Program, arch: Architecture, settings: Settings, cluster: Cluster, assumed: list[str]
) -> Settings:
    """With the stated recomputation, or else the least that fits."""
    stated = _stated_recompute(line, program)
    costs = make_cost_model(cluster)
    if stated is not None:
        if not line.get("activation_ckpt"):
            assumed.append(f"recomputation = {stated}, as documented")
        settings = replace(settings, recompute=stated)
        return _with_offload(arch, settings, costs) if program.offloads else settings
    policies: tuple[Recompute, ...] = (
        ("none", "attention", "full") if settings.software.attention == "unfused" else ("none", "full")
    )
    for policy in policies:
        trial = replace(settings, recompute=policy)
        if estimate(arch, trial, costs).memory.fits:
            break
    assumed.append(f"recomputation = {policy}")
    return trial


def _with_offload(arch: Architecture, settings: Settings, costs: CostModel) -> Settings:
    """With as many tenths of the activations offloaded as do not fit."""
    tenths = next((n for n in range(10) if estimate(arch, replace(settings, offloaded=n / 10), costs).memory.fits), 0)
    return replace(settings, offloaded=tenths / 10)


def _stated_recompute(line: Line, program: Program) -> Recompute | None:
    text = line.get("activation_ckpt", "").lower()
    mfu, hfu = _number(line, "mfu"), _number(line, "hfu")
    if text.startswith("full") or (text.startswith("selective") and mfu and hfu and hfu > 1.25 * mfu):
        return "full"
    if text.startswith("none"):
        return "none"
    if "attn" in text:
        return "attention"
    if "moe" in text:
        return "selective"
    if text.startswith("selective"):
        return "selective" if "op" in text.split() or program.name == "torchtitan" else "none"
    return program.recompute


# -- the measurement


def _tokens_s(line: Line, program: Program, arch: Architecture, settings: Settings, cluster: Cluster) -> float:
    """Tokens per second and device, or else from FLOP/s or MFU in the source's convention."""
    reported = _number(line, "tok_s_per_gpu")
    if reported:
        return reported
    per_token = (flops_per_token if program.half_attention else flops_per_token_full_attention)(arch, settings.seq)
    if program.counts_positions:
        per_token += 6 * arch.positions * arch.dim
    flops, mfu = _number(line, "tflops_per_gpu"), _number(line, "mfu")
    if flops:
        return flops * T / per_token
    if mfu:
        return mfu / 100 * cluster.chip.peak("bf16") / per_token
    raise UnmodelledRun("columns tok_s_per_gpu, tflops_per_gpu and mfu are missing")
