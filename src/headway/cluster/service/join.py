"""How a node joins: a single-use token is exchanged for a certificate, which only whoever made its key can use.

A repeated exchange by the same key gets a certificate again, since the first answer may have been lost. Whoever reports
for a node is known by the certificate that was recorded last: replacing a node locks out what had its name before.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Row, delete, insert, select, update

from headway import __version__
from headway.cluster.service.certificates import Authority, certificate_pem, fingerprint_of, key_digest, read_request
from headway.cluster.service.fleet import on_node
from headway.cluster.service.messages import PROTOCOL
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import join_tokens, maintenance, node_conditions, nodes, ranks
from headway.errors import UsageError

TOKEN_S = 600.0
"""How long a join token may be used."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


class NodeSpec(BaseModel):
    """What jobs may use of a node."""

    model_config = ConfigDict(extra="forbid")
    chip: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}$")]
    gpus: Annotated[list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/-]{1,100}$")]], Field(max_length=64)]
    cpus: Annotated[int, Field(ge=1, le=65536)]
    memory_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    tenants: Annotated[list[str] | None, Field(max_length=1000)] = None
    """Whose jobs it runs; None: those of the only tenant that there is."""


class JoinRequest(BaseModel):
    """A node that wants to join."""

    model_config = ConfigDict(extra="forbid")
    token: str = Field(max_length=200)
    name: Name
    spec: NodeSpec
    request: str = Field(max_length=10_000)
    """Signing request for its certificate, as PEM."""
    protocol: int = PROTOCOL
    version: str = Field(default=__version__, max_length=40)


def make_join_token(store: ServiceStore, now: float, replaces: str | None = None) -> tuple[str, float]:
    """A new token, and when it expires, in Unix seconds; `replaces` names a node that may get another certificate."""
    token, expires = secrets.token_urlsafe(32), now + TOKEN_S
    with store.write() as transaction:
        if replaces is not None and _node(transaction, replaces) is None:
            raise UsageError(f"unknown node '{replaces}'", hint="headway nodes --engine service lists them")
        transaction.execute(delete(join_tokens).where(join_tokens.c.expires < now - 86400))
        transaction.execute(insert(join_tokens).values(digest=_digest(token), expires=expires, replaces=replaces))
    return token, expires


def check_protocol(name: str, protocol: int, version: str) -> None:
    """Raise UsageError if a node's agent is of another version than can be understood."""
    if protocol != PROTOCOL:
        raise UsageError(
            f"node '{name}' has Headway {version or '?'}, which speaks version {protocol} of the node protocol; "
            f"the service {__version__} speaks {PROTOCOL}",
            hint=f"install Headway {__version__} on the node",
        )


def join(plane: ControlPlane, store: ServiceStore, authority: Authority, asked: JoinRequest) -> dict[str, Any]:
    """Admit a node, and return its certificate."""
    request = read_request(asked.request)
    check_protocol(asked.name, asked.protocol, asked.version)
    tenants = _tenants(plane.cluster.tenants, asked)
    if len(set(asked.spec.gpus)) < len(asked.spec.gpus):
        raise UsageError(f"node '{asked.name}' lists a GPU twice: {', '.join(asked.spec.gpus)}")
    key, certificate = key_digest(request), authority.sign_node(asked.name, request)
    spec = {"name": asked.name, **asked.spec.model_dump(), "tenants": tenants}
    with store.write() as transaction:
        _use_token(transaction, asked, key, plane.wall_s)
        conditions = {"fingerprint": fingerprint_of(certificate), "version": asked.version}
        _write_node(transaction, spec, conditions)
        plane.record_nodes(transaction)
    plane.node_joined(asked.name)
    return {
        "name": asked.name,
        "certificate": certificate_pem(certificate),
        "cluster": store.cluster,
        "tenants": tenants,
    }


def _tenants(known: Sequence[str], asked: JoinRequest) -> list[str]:
    """Whose jobs a node is to run; UsageError if that is not said, or not known."""
    if asked.spec.tenants is None and len(known) == 1:
        return list(known)
    names, hint = sorted(set(asked.spec.tenants or ())), f"known tenants: {', '.join(known)}"
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"unknown tenant '{unknown[0]}'", hint=hint)
    if not names:
        raise UsageError(f"node '{asked.name}' does not say whose jobs it runs", hint=f"--tenant NAME; {hint}")
    return names


def remove_node(plane: ControlPlane, store: ServiceStore, name: str) -> None:
    """Forget a node, and with it its certificate; UsageError while jobs are on it."""
    with store.write() as transaction:
        if _node(transaction, name) is None:
            raise UsageError(f"unknown node '{name}'", hint="headway nodes --engine service lists them")
        busy = transaction.execute(select(ranks.c.job).where(on_node(name)).limit(1)).scalar()
        if busy is not None:
            raise UsageError(f"job {busy} is on node '{name}'", hint=f"headway drain {name}")
        for column in (nodes.c.name, node_conditions.c.name, maintenance.c.node):
            transaction.execute(delete(column.table).where(column == name))
        plane.record_nodes(transaction)
    plane.nodes_changed()


def _use_token(transaction: Transaction, asked: JoinRequest, key: str, now: float) -> None:
    """Take a token for a key; UsageError if it cannot be used for this node."""
    mine = join_tokens.c.digest == _digest(asked.token)
    token, hint = transaction.execute(select(join_tokens).where(mine)).first(), "headway node token makes another"
    if token is None:
        raise UsageError("unknown join token", hint=hint)
    if token.used_by not in (None, key):
        raise UsageError("the join token has been used: it admits one node", hint=hint)
    if token.expires <= now:
        raise UsageError(f"the join token has expired, {now - token.expires:.0f} s ago", hint=hint)
    if token.replaces not in (None, asked.name):
        raise UsageError(f"the join token is for node '{token.replaces}', not '{asked.name}'", hint=hint)
    if token.replaces is None and token.used_by is None and _node(transaction, asked.name) is not None:
        raise UsageError(
            f"there is a node named '{asked.name}'",
            hint=f"choose another --name; headway node token --replace {asked.name} if this is its successor",
        )
    if token.used_by is not None and _node(transaction, asked.name) is None:
        raise UsageError("the join token has been used: it admits one node", hint=hint)  # under another name
    transaction.execute(update(join_tokens).where(mine).values(used_by=key))


def _write_node(transaction: Transaction, spec: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
    name, known = spec["name"], _node(transaction, spec["name"])
    busy = transaction.execute(select(ranks.c.job).where(on_node(name)).limit(1)).first() is not None
    if known is None:
        transaction.execute(insert(nodes).values(name=name, spec=json.dumps(spec), state="draining"))
    elif not busy:  # else it counts as before, until it is replaced again
        transaction.execute(update(nodes).where(nodes.c.name == name).values(spec=json.dumps(spec)))
    where = node_conditions.c.name == name
    if not transaction.execute(update(node_conditions).where(where).values(**conditions)).rowcount:
        transaction.execute(insert(node_conditions).values(name=name, **conditions))


def _node(transaction: Transaction, name: str) -> Row[Any] | None:
    return transaction.execute(select(nodes).where(nodes.c.name == name)).first()


def _digest(token: str) -> str:
    """Tokens have 256 random bits, so a plain hash hides them."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_name(name: str) -> None:
    """Raise UsageError for what cannot be the name of a node."""
    if not re.fullmatch(NAME, name):
        raise UsageError(f"invalid node name {name!r}", hint="letters, digits, dots, dashes and underscores; --name")
