"""The nodes and tenants that a service starts with: this machine, or emulated nodes with GPUs that are only names."""

import json
import os
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert, select, update

from headway.cluster.engines.local.engine import local_gpus
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import facts
from headway.cluster.service.tenant_changes import tenants_at_start
from headway.cluster.simulate.site import read_site
from headway.errors import UsageError
from headway.hardware import devices, gpu_uuids

DEFAULT_TENANTS: list[dict[str, Any]] = [{"name": "default"}]
"""One that may use everything."""
_LISTED = "tenants of the file"
_EMULATED = re.compile(r"([1-9][0-9]{0,2})x([0-9]{1,2})")


def this_machine(gpus: int | None = None, cpus: int | None = None) -> dict[str, Any]:
    """This machine as a node; `gpus` and `cpus` limit what jobs may use."""
    ids = tuple(gpu_uuids()) or local_gpus()
    if gpus is not None:
        if gpus > len(ids) and ids:
            raise UsageError(f"this machine has {len(ids)} GPUs, not {gpus}", hint=f"--gpus {len(ids)} or fewer")
        ids = ids[:gpus] or tuple(map(str, range(gpus)))
    return {
        "name": socket.gethostname(),
        "chip": (devices("auto").name or "gpu") if ids and local_gpus() else "cpu",
        "gpus": list(ids),
        "cpus": cpus or len(os.sched_getaffinity(0)),
        "memory_bytes": int(psutil.virtual_memory().total),
    }


def emulated_nodes(shape: str, cpus: int | None = None) -> list[dict[str, Any]]:
    """Nodes of this machine with fake GPUs, such as 3x4: jobs see their numbers in CUDA_VISIBLE_DEVICES."""
    match = _EMULATED.fullmatch(shape)
    if match is None:
        raise UsageError(f"--emulate {shape}: not NODESxGPUS", hint="for example --emulate 3x4")
    memory = int(psutil.virtual_memory().total)
    gpus = list(map(str, range(int(match[2]))))
    return [
        {"name": f"node-{number}", "chip": "fake", "gpus": gpus, "cpus": cpus or 16, "memory_bytes": memory}
        for number in range(1, int(match[1]) + 1)
    ]


def starting_tenants(store: ServiceStore, listed: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tenants that a service starts with, given those of its file (None: it has none)."""
    recorded = None if store.lines.cluster is None else store.lines.cluster["tenants"]
    if listed is None:
        return tenants_at_start(None, None, recorded, DEFAULT_TENANTS)
    mine, text = facts.c.name == _LISTED, json.dumps(listed)
    with store.write() as transaction:
        before = transaction.execute(select(facts.c.value).where(mine)).scalar()
        if before is None:
            transaction.execute(insert(facts).values(name=_LISTED, value=text))
        elif before != text:
            transaction.execute(update(facts).where(mine).values(value=text))
    return tenants_at_start(listed, None if before is None else json.loads(before), recorded, DEFAULT_TENANTS)


def tenants_of(file: Path | None) -> list[dict[str, Any]] | None:
    """The tenants of a cluster.toml; None without one."""
    if file is None:
        return None
    try:
        tenants = read_site(file).tenants
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # TOML
        raise UsageError(f"{file}: {error}") from None
    if not tenants:
        raise UsageError(f"{file} lists no tenants", hint='[[tenant]] with name = "..."')
    return [{key: value for key, value in asdict(tenant).items() if value is not None} for tenant in tenants]
