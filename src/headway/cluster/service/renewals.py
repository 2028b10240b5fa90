"""Certificates that nodes are given before theirs end: each counts as the one that its node joined with.

So whatever ends that one (a successor, the node's removal) ends those that were given for it; their own ends are seen
by TLS. An answer may be lost: the node asks again, with another key, and the certificate that it never saw ends unused.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, insert, select

from headway.cluster.service.certificates import Authority, certificate_pem, fingerprint_of, read_request
from headway.cluster.service.peer_certificate import PEER
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import node_conditions, renewed_certificates
from headway.errors import UsageError

MOST_OF_NODE = 8
"""Renewed certificates that count at a time, beside the one that asks for another."""


class NodeCertificates:
    """Which node a certificate is of; read once, since one service at a time gives them."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        with store.read() as connection:
            rows = connection.execute(select(renewed_certificates)).all()
        self._first = {row.fingerprint: row.first for row in rows}

    def shown(self, scope: Mapping[str, Any]) -> str | None:
        """The fingerprint that whoever sent a request is known by; None without a certificate."""
        peer: str | None = scope.get(PEER)
        return None if peer is None else self._first.get(peer, peer)

    def renew(self, authority: Authority, scope: Mapping[str, Any], request: str, now: float) -> str:
        """Sign another certificate for the node that asks with its own, and return it as PEM."""
        read, peer = read_request(request), self.shown(scope)
        with self._store.write() as transaction:
            mine = node_conditions.c.fingerprint == peer
            name = None if peer is None else transaction.execute(select(node_conditions.c.name).where(mine)).scalar()
            if peer is None or name is None:
                raise UsageError(
                    "the certificate is of no node: it was replaced or removed",
                    hint="headway node token makes a token to join with",
                )
            certificate = authority.sign_node(name, read)
            given, ends = fingerprint_of(certificate), certificate.not_valid_after_utc.timestamp()
            self._drop(transaction, peer, scope[PEER], now)
            transaction.execute(insert(renewed_certificates).values(fingerprint=given, first=peer, ends=ends))
        self._first = {**self._first, given: peer}
        return certificate_pem(certificate)

    @staticmethod
    def _drop(transaction: Transaction, peer: str, used: str, now: float) -> None:
        """Forget certificates that have ended, and the oldest of a node that has asked for too many, but for the one
        that it uses."""
        table = renewed_certificates
        transaction.execute(delete(table).where(table.c.ends < now))
        newest = select(table.c.fingerprint).where((table.c.first == peer) & (table.c.fingerprint != used))
        surplus = transaction.execute(newest.order_by(table.c.ends.desc())).scalars().all()[MOST_OF_NODE - 1 :]
        transaction.execute(delete(table).where(table.c.fingerprint.in_(surplus)))
