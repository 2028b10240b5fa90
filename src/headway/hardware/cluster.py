"""Clusters: nodes of devices, and the network levels between them.

    --on h100x8x16            sixteen nodes of eight with the default network
    --cluster cluster.toml    with your own network, prices and failure rate

A level connects groups of devices: eight in an NVLink domain, 256 under the leaf switches of a rail-optimized unit, all
through the spine. Bandwidth is per device and direction, before oversubscription.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.errors import UsageError, what_is_wrong
from headway.hardware.chips import GIB, Chip, G, Link, find_chip, known_chip

GPU_HOURS_BETWEEN_FAILURES = 50_700.0
"""The Llama 3 Herd of Models (2024), table 5: 419 unexpected interruptions of 16,384 H100 in 54 days."""

MOST_DEVICES = 10_000_000
"""Largest plausible cluster."""
FORM = "CHIPxPERNODExNODES, for example h100x8x16"


@dataclass(frozen=True)
class Level:
    """A network level: how devices reach those that no lower level connects."""

    name: str
    """nvlink, pcie, rail, leaf, spine or any other name."""
    devices: int
    """Devices per group; the last level connects all."""
    bandwidth_bytes_s: float
    """Per device and direction, before oversubscription."""
    latency_s: float
    """Per hop of a message, software included."""
    oversubscription: float = 1.0
    """Total device bandwidth over the switches' capacity; 1 is non-blocking."""
    source: str = ""
    """Source of the figures."""

    @property
    def effective_bytes_s(self) -> float:
        """Bandwidth per device and direction when all use the level at once."""
        return self.bandwidth_bytes_s / self.oversubscription

    def describe(self) -> str:
        """One line of text."""
        over = f", {self.oversubscription:g}:1 oversubscribed" if self.oversubscription > 1 else ""
        rate = f"{self.bandwidth_bytes_s / G:>6.4g} GB/s"
        return f"{self.name:<8}{self.devices:>7} devices  {rate}  {self.latency_s * 1e6:.3g} us{over}"


@dataclass(frozen=True)
class Cluster:
    """Nodes of one chip, and the network between them."""

    name: str
    chip: Chip
    per_node: int
    nodes: int
    levels: tuple[Level, ...]
    """From the smallest and fastest to the one that connects all devices; none for a single device."""
    price_per_gpu_hour: float | None = None
    gpu_hours_between_failures: float | None = None
    """Mean per device; None if unknown."""
    power_limit_w: float | None = None
    """Power cap per device; None for the chip's own limit."""
    storage_bytes_s: float | None = None
    """Write rate of the storage of runs, all nodes together; None if unknown."""
    storage_bytes: float | None = None
    """Room for checkpoints there; None if unknown."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.per_node * self.nodes

    @property
    def power_w(self) -> float:
        """Power limit per device."""
        return min(self.chip.power_w, self.power_limit_w or math.inf)

    def level(self, extent: int) -> Level:
        """The level that connects a group of devices; `extent` is the distance from its first to its last.

        A group of 4 with stride 8 has an extent of 32. Groups that do not divide a level's groups cross a boundary
        somewhere and use the next level.
        """
        if not 1 < extent <= self.devices:
            raise UsageError(f"{self.name} has no group of {extent} devices", hint=f"it has {self.devices}")
        for level in self.levels:
            spans_all = extent == self.devices and level.devices >= extent
            if spans_all or level.devices % extent == 0:
                return level
        return self.levels[-1]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the chip by name."""
        fields = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return {**fields, "chip": self.chip.name, "levels": [asdict(level) for level in self.levels]}


# -- default nodes and networks


@dataclass(frozen=True)
class _NodeDefaults:
    """Default node and network of a chip."""

    per_node: int
    network_gbit_s: float
    """Per device and direction."""
    unit: int
    """Nodes under one set of leaf switches."""
    source: str


_SUPERPOD = "NVIDIA DGX SuperPOD reference architecture"
_CARD_DEFAULTS = _NodeDefaults(8, 50, 16, "assumed: one 400 Gb/s port for a node of eight cards")
_NODE_DEFAULTS: Mapping[str, _NodeDefaults] = MappingProxyType(
    {
        "a100-40": _NodeDefaults(8, 200, 20, f"{_SUPERPOD} (A100): eight 200 Gb/s ports a node, 20 nodes a unit"),
        "a100": _NodeDefaults(8, 200, 20, f"{_SUPERPOD} (A100): eight 200 Gb/s ports a node, 20 nodes a unit"),
        "h100": _NodeDefaults(8, 400, 32, f"{_SUPERPOD} (H100): eight 400 Gb/s ports a node, 32 nodes a unit"),
        "h200": _NodeDefaults(8, 400, 32, f"{_SUPERPOD} (H200): eight 400 Gb/s ports a node, 32 nodes a unit"),
        "b200": _NodeDefaults(8, 400, 32, f"{_SUPERPOD} (B200): eight 400 Gb/s ports a node, 32 nodes a unit"),
        "b300": _NodeDefaults(8, 800, 64, f"{_SUPERPOD} (B300): eight 800 Gb/s ports a node, 64 nodes a unit"),
        "gb200": _NodeDefaults(4, 400, 144, f"{_SUPERPOD} (GB200): a 400 Gb/s port a GPU, 8 racks of 18 nodes a unit"),
        "gb300": _NodeDefaults(4, 800, 144, f"{_SUPERPOD} (GB300): an 800 Gb/s port a GPU, 8 racks of 18 nodes a unit"),
        "mi300x": _NodeDefaults(8, 400, 32, "AMD Instinct MI300X cluster reference: eight 400 Gb/s ports a node"),
        "rtx4090": _NodeDefaults(8, 12.5, 16, "assumed: one 100 Gb/s port for a node of eight cards"),
        "cpu": _NodeDefaults(1, 25, 32, "assumed: one 25 Gb/s port a node"),
    }
)
# Per hop of a message: between the low-latency and bandwidth protocols in NCCL's tuning tables.
_LATENCY_S = MappingProxyType({"nvlink": 2e-6, "xgmi": 3e-6, "pcie": 4e-6, "memory": 2e-6, "network": 6e-6})
_SPINE_HOPS_S = 1.5e-6


def default_cluster(chip: Chip, per_node: int | None = None, nodes: int = 1, name: str | None = None) -> Cluster:
    """A cluster with the default network of its chip."""
    default = _NODE_DEFAULTS.get(chip.name, _CARD_DEFAULTS)
    per_node = per_node or default.per_node
    devices = per_node * nodes
    levels = [_in_node(chip, link, per_node, devices) for link in chip.links]
    unit = default.unit * per_node
    port = default.network_gbit_s / 8 * G
    latency = _LATENCY_S["network"]
    levels.append(Level("rail", min(unit, devices), port, latency, source=default.source))
    levels.append(Level("spine", devices, port, latency + _SPINE_HOPS_S, source=f"{default.source}; non-blocking"))
    return Cluster(
        name=name or f"{chip.name}x{per_node}x{nodes}", chip=chip, per_node=per_node, nodes=nodes,
        levels=_needed(levels),
    )  # fmt: skip


def _in_node(chip: Chip, link: Link, per_node: int, devices: int) -> Level:
    """A chip's link as a level; it ends at the node, except in rack-scale NVLink domains."""
    if link.devices > 8:
        joined = min(link.devices // per_node * per_node, devices) if per_node <= link.devices else per_node
    else:
        joined = min(link.devices, per_node) if link is not chip.links[-1] else per_node
    kind = next(kind for kind in ("nvlink", "xgmi", "pcie", "memory") if link.kind.startswith(kind))
    return Level(kind, joined, link.bandwidth_bytes_s, _LATENCY_S[kind], source=chip.source_of("links"))


def _needed(levels: list[Level]) -> tuple[Level, ...]:
    """Levels that connect more devices than the one below."""
    needed: list[Level] = []
    for level in levels:
        if level.devices > (needed[-1].devices if needed else 1):
            needed.append(level)
    return tuple(needed)


# -- from the command line


def parse_on(text: str, default_node: bool = False) -> Cluster:
    """Parse `--on CHIPxPERNODExNODES`; NODES defaults to 1, a chip alone is one device or its default node."""
    name, *numbers = _split(text.strip().lower())
    known = known_chip(name)
    if not numbers:
        return default_cluster(known, None if default_node else 1)
    per_node, nodes = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1
    if per_node < 1 or nodes < 1:
        raise UsageError(f"--on {text}: needs at least one node and one device", hint=f"the form is {FORM}")
    if per_node * nodes > MOST_DEVICES:
        raise UsageError(f"--on {text}: more than {MOST_DEVICES:,} devices", hint=f"the form is {FORM}")
    return default_cluster(known, per_node, nodes)


def _split(text: str) -> list[str]:
    """Split into a chip's name and up to two numbers; names may contain an x (rtx4090, mi300x)."""
    splits = [[text], text.rsplit("x", 1), text.rsplit("x", 2)]
    splits = [split for split in splits if split[0] and all(part.isdecimal() for part in split[1:])]
    known = [split for split in splits if find_chip(split[0]) is not None]
    if known:
        return known[0]
    if len(splits) == 1 and "x" in text and find_chip(text.split("x")[0]) is not None:
        raise UsageError(f"--on {text}: expected {FORM.split(',')[0]}", hint=f"for example {FORM.split()[-1]}")
    return splits[-1] if splits else [text]


# -- from a file


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Positive = Annotated[float, Field(gt=0, le=1e12)]
Count = Annotated[int, Field(gt=0)]


class _LevelFile(_Section):
    """A [[level]] of cluster.toml."""

    name: str
    devices: Count | None = None
    gigabytes_s: Positive | None = None
    gigabits_s: Positive | None = None
    microseconds: Positive | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.gigabytes_s is None) == (self.gigabits_s is None):
            raise ValueError("needs either gigabytes_s or gigabits_s")
        return self

    def level(self, whole: int, origin: str) -> Level:
        """The level, in bytes and seconds."""
        rate = self.gigabytes_s * G if self.gigabytes_s is not None else (self.gigabits_s or 0.0) / 8 * G
        kind = next((kind for kind in _LATENCY_S if self.name.startswith(kind)), "network")
        latency = self.microseconds / 1e6 if self.microseconds is not None else _LATENCY_S[kind]
        return Level(self.name, min(self.devices or whole, whole), rate, latency, self.oversubscription, origin)


class _ClusterFile(_Section):
    """cluster.toml."""

    format: Literal[1] = 1
    name: str | None = None
    chip: str
    per_node: Count | None = None
    nodes: Count = 1
    memory_gib: Positive | None = None
    """Overrides the device memory of the catalogue."""
    bandwidth_gigabytes_s: Positive | None = None
    """Overrides the memory bandwidth of the catalogue."""
    power_limit_w: Positive | None = None
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    gpu_hours_between_failures: Positive | None = None
    storage_gigabytes_s: Positive | None = None
    """Write rate of the storage of runs, all nodes together."""
    storage_terabytes: Positive | None = None
    """Room for checkpoints there."""
    topology: str | None = None
    """A file with the hosts and their network, next to this one; for schedulers."""
    away: str | None = None
    """A file with node maintenance windows; for schedulers."""
    tenant: tuple[dict[str, Any], ...] = ()
    """Tenants; schedulers validate them."""
    level: tuple[_LevelFile, ...] = ()


def load_cluster(file: Path) -> Cluster:
    """Read a cluster.toml; missing keys have the defaults of the chip."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "headway recipe cp clusters/h100-rail copies an example; --on h100x8x16 needs no file"
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}", hint=hint) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from None
    try:
        parsed = _ClusterFile.model_validate(values)
    except ValidationError as error:
        raise _explain(error, file) from None
    try:
        return _build(parsed, file)
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", hint=error.hint) from None


def _build(parsed: _ClusterFile, file: Path) -> Cluster:
    chip = _with_overrides(known_chip(parsed.chip), parsed, file)
    name = parsed.name or file.stem
    default = default_cluster(chip, parsed.per_node, parsed.nodes, name)
    if default.devices > MOST_DEVICES:
        raise UsageError(f"more than {MOST_DEVICES:,} devices", hint=f"{default.nodes:,} nodes of {default.per_node:,}")
    levels = default.levels
    if parsed.level:
        levels = tuple(level.level(default.devices, str(file)) for level in parsed.level)
        _check_levels(levels, default)
    return replace(
        default,
        levels=levels,
        price_per_gpu_hour=parsed.price_per_gpu_hour,
        gpu_hours_between_failures=parsed.gpu_hours_between_failures,
        power_limit_w=parsed.power_limit_w,
        storage_bytes_s=None if parsed.storage_gigabytes_s is None else parsed.storage_gigabytes_s * G,
        storage_bytes=None if parsed.storage_terabytes is None else parsed.storage_terabytes * 1000 * G,
    )


def _with_overrides(chip: Chip, parsed: _ClusterFile, file: Path) -> Chip:
    """The chip with the overrides of the file."""
    changes: dict[str, Any] = {}
    if parsed.memory_gib is not None:
        changes["memory_bytes"] = int(parsed.memory_gib * GIB)
    if parsed.bandwidth_gigabytes_s is not None:
        changes["bandwidth_bytes_s"] = parsed.bandwidth_gigabytes_s * G
    notes = {**chip.notes, **dict.fromkeys(changes, str(file))}
    return replace(chip, **changes, notes=MappingProxyType(notes)) if changes else chip


def _check_levels(levels: tuple[Level, ...], cluster: Cluster) -> None:
    for lower, upper in pairwise(levels):
        if upper.devices <= lower.devices:
            raise UsageError(
                f"level {upper.name} connects {upper.devices} devices, but {lower.name} below connects {lower.devices}",
                hint="order levels from the smallest to the largest; the last needs no devices key",
            )
        if upper.devices % lower.devices and upper is not levels[-1]:
            raise UsageError(
                f"level {upper.name} connects {upper.devices} devices, not a multiple of {lower.name}'s {lower.devices}"
            )
    if levels[-1].devices < cluster.devices:
        raise UsageError(
            f"no level connects all {cluster.devices} devices: {levels[-1].name} connects {levels[-1].devices}",
            hint="remove devices from the last level, or add a level above it",
        )


def _explain(error: ValidationError, file: Path) -> UsageError:
    """The first validation error as a sentence, with a hint."""
    first = min(error.errors(), key=lambda mistake: mistake["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *place, name = first["loc"]
        section: type[BaseModel] = _LevelFile if place else _ClusterFile
        known = list(section.model_fields)
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"keys: {', '.join(known)}"
        return UsageError(f'{file}: unknown {"level" if place else "cluster"} key "{name}"', hint=hint)
    if first["type"] == "missing":
        return UsageError(f"{file}: missing key {key}", hint='for example chip = "h100"' if key == "chip" else None)
    if first["type"] == "value_error":
        return UsageError(f"{file}: {key}: {what_is_wrong(first)}")
    return UsageError(f"{file}: {key} = {first['input']!r}: {what_is_wrong(first)}")
