"""What is wrong with a node, by what it can see of itself: pure, but for one function that looks."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.hardware import gpu_uuids

LEAST_BYTES = 2**30
"""Free space below which a job cannot be expected to start."""
CHECK_S = 30.0


@dataclass(frozen=True)
class NodeFacts:
    """What was seen of a node."""

    gpus: Sequence[str] | None
    """UUIDs of those that answer; None if the node's GPUs are only names."""
    free_bytes: int
    """Of the disk of the node's folder."""
    writable: bool = True


def problems(spec: Mapping[str, Any], facts: NodeFacts) -> tuple[str, ...]:
    """Why a node should get no jobs, a sentence each."""
    missing = [] if facts.gpus is None else [gpu for gpu in spec.get("gpus", ()) if gpu not in facts.gpus]
    sentences = [f"GPU {gpu} does not answer" for gpu in missing]
    if not facts.writable:
        sentences.append("its folder cannot be written")
    elif facts.free_bytes < LEAST_BYTES:
        sentences.append(f"its disk has {facts.free_bytes / 2**20:.0f} MiB left")
    return tuple(sentences)


def look(spec: Mapping[str, Any], folder: Path) -> NodeFacts:
    """See what a node has now."""
    real = any(gpu.startswith(("GPU-", "MIG-")) for gpu in spec.get("gpus", ()))
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return NodeFacts(gpu_uuids() if real else None, 0, writable=False)
    return NodeFacts(gpu_uuids() if real else None, free, os.access(folder, os.W_OK))
