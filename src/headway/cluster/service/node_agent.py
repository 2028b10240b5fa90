"""A machine as a node of a service elsewhere: joins once, and runs its agent from then on.

<folder>/
  node.json                 the service, this node's name, and as whom its jobs run
  certificate.pem           what it shows to the service, and the key of that: node_certificate.py
  node.key                  the key that it asked to join with
  lock epoch starts/        as host_starts.py has them
"""

import json
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.certificates import signing_request
from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.isolation import Isolation, isolation_of
from headway.cluster.service.join import check_name
from headway.cluster.service.node_certificate import NodeCertificate
from headway.cluster.service.node_process import run_agent
from headway.errors import EngineError, UnknownNode, UsageError

SETTINGS, KEY, CERTIFICATE = "node.json", "node.key", "certificate.pem"


@dataclass(frozen=True)
class NodeSettings:
    """What an agent needs to know of its node."""

    url: str
    name: str
    fingerprint: str | None
    """Of the service's certificate; None: one that this machine trusts."""
    spec: dict[str, Any]
    """What jobs may use, and whose jobs it runs."""
    users: dict[str, str] = field(default_factory=dict)
    """Unix user of each tenant; without any, jobs run as the agent's."""
    jobs_as_root: bool = False
    """Whether that may be root."""


def join_cluster(folder: Path, settings: NodeSettings, token: str) -> None:
    """Exchange a join token for a certificate. If the answer is lost, repeating it with the same token helps."""
    check_name(settings.name)
    if urlsplit(settings.url).scheme != "https":
        raise UsageError(f"{settings.url} is not https://", hint="headway up --host ADDRESS prints the URL")
    if (folder / SETTINGS).exists():
        known = read_settings(folder)
        raise UsageError(
            f"{folder} belongs to node '{known.name}' of {known.url}",
            hint=f"headway node run --folder {folder} starts it; choose another --folder to join again",
        )
    _isolation(folder, settings)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    spec = {key: value for key, value in settings.spec.items() if key != "name"}
    request = signing_request(folder / KEY, settings.name)
    body = {"token": token, "name": settings.name, "spec": spec, "request": request}
    connection = ServiceConnection(settings.url, None, fingerprint=settings.fingerprint)
    answer = connection.post("/api/v1/join", body)
    replace_file(folder / CERTIFICATE, answer["certificate"] + (folder / KEY).read_text(), private=True)
    fields = asdict(settings) | {"spec": settings.spec | {"tenants": answer["tenants"]}}
    replace_file(folder / SETTINGS, json.dumps({"format": 1, **fields}, indent=1) + "\n")


def read_settings(folder: Path) -> NodeSettings:
    """What `join_cluster` wrote."""
    try:
        fields = json.loads((folder / SETTINGS).read_text())
        del fields["format"]
        return NodeSettings(**fields)
    except FileNotFoundError:
        raise UsageError(f"{folder} is not the folder of a node", hint="headway node join URL") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"cannot read {folder / SETTINGS}: {error}", hint="join again in another folder") from None


def trust_service(folder: Path, fingerprint: str) -> NodeSettings:
    """Have a node that has joined expect another certificate of its service, and return what it expected before."""
    settings = read_settings(folder)
    fields = asdict(replace(settings, fingerprint=fingerprint))
    replace_file(folder / SETTINGS, json.dumps({"format": 1, **fields}, indent=1) + "\n")
    return settings


def _isolation(folder: Path, settings: NodeSettings) -> Isolation:
    tenants = settings.spec.get("tenants") or [""]  # before it has joined: the only one, which the answer names
    return isolation_of(folder, tenants, settings.users, jobs_as_root=settings.jobs_as_root)


def run_node(folder: Path, *, jobs_as_root: bool = False) -> int:
    """Run the agent of a node that has joined, until Ctrl-C or SIGTERM; its jobs go on. UnknownNode if it was
    removed."""
    settings, stopping = read_settings(folder), threading.Event()
    settings = replace(settings, jobs_as_root=settings.jobs_as_root or jobs_as_root)
    isolation = _isolation(folder, settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    certificate = NodeCertificate(folder / CERTIFICATE, folder / KEY, settings.name)
    connection = ServiceConnection(
        settings.url, None, keep=True, fingerprint=settings.fingerprint, certificate=certificate.file
    )
    print(f"node {settings.name} of {settings.url}: Ctrl-C ends its agent; jobs go on", file=sys.stderr, flush=True)
    try:
        return run_agent(
            settings.name,
            folder,
            connection,
            lambda: not stopping.is_set(),
            spec=settings.spec,
            isolation=isolation,
            certificate=certificate,
        )
    except UnknownNode as error:
        if isolation.cgroups is not None:
            isolation.cgroups.close()
        raise UnknownNode(
            f"{settings.url}: {error.message}",
            hint=f"to join again: rm {folder / SETTINGS}, then headway node join with a new token",
        ) from None
