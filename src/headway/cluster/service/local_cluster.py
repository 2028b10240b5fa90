"""The nodes and tenants that a service starts with: this machine, or emulated nodes with GPUs that are only names."""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert, select, update

from headway.cluster.engines.local.engine import local_gpus
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import facts, node_conditions, nodes, ranks
from headway.cluster.service.tenant_changes import tenants_at_start
from headway.cluster.simulate.site import read_site
from headway.errors import UsageError
from headway.hardware import devices, gpu_uuids

DEFAULT_TENANTS: list[dict[str, Any]] = [{"name": "default"}]
"""One that may use everything."""
_LISTED = "tenants of the file"
_OPTIONS = "options of the local nodes"
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
    with store.write() as transaction:
        before = _replace_fact(transaction, _LISTED, json.dumps(listed))
    return tenants_at_start(listed, None if before is None else json.loads(before), recorded, DEFAULT_TENANTS)


def keep_local_nodes(
    store: ServiceStore, specs: Sequence[Mapping[str, Any]], options: str, *, forget: bool = False
) -> None:
    """Remember the `options` of `headway up` that name this machine's nodes. UsageError if jobs are on local nodes of
    the last start that are not among `specs`, unless these are gone (`forget`): without an agent their exits cannot be
    seen, and a job that is taken for lost would run twice."""
    names = [spec["name"] for spec in specs]
    absent = (
        select(ranks.c.node, ranks.c.job)
        .join(nodes, nodes.c.name == ranks.c.node)
        .outerjoin(node_conditions, node_conditions.c.name == ranks.c.node)
        .where(ranks.c.state.in_(("issued", "running")) & ranks.c.node.not_in(names))
        .where(node_conditions.c.fingerprint.is_(None))
    )
    with store.read() as connection:
        left = connection.execute(absent).all()
        before = connection.execute(select(facts.c.value).where(facts.c.name == _OPTIONS)).scalar()
    if left and not forget:
        on, held = (", ".join(sorted(set(column))) for column in zip(*left, strict=True))
        again = "the options of the last start" if before is None else f"headway up {before}".rstrip()
        raise UsageError(
            f"jobs may still run on nodes that this start leaves out: {held} on {on}",
            hint=f"{again} keeps these nodes; --forget-nodes if nothing runs there any more",
        )
    if before != options:
        with store.write() as transaction:
            _replace_fact(transaction, _OPTIONS, options)


def _replace_fact(transaction: Transaction, name: str, text: str) -> str | None:
    """Write a fact if it changes, and return what it was."""
    mine = facts.c.name == name
    before: str | None = transaction.execute(select(facts.c.value).where(mine)).scalar()
    if before is None:
        transaction.execute(insert(facts).values(name=name, value=text))
    elif before != text:
        transaction.execute(update(facts).where(mine).values(value=text))
    return before


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
