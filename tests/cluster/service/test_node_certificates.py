"""Certificates of nodes and of the service over the years: renewed, ended, revoked, and expired but pinned."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import test_node_connections
from cryptography import x509
from test_node_connections import USER, Served, certificate, join, serve
from test_node_joining import Cluster

from headway.cluster.service.certificates import (
    NODE_VALID,
    VALID,
    Authority,
    fingerprint_of,
    new_key,
    read_request,
    request_for_key,
)
from headway.cluster.service.connection import ServiceConnection, node_path
from headway.cluster.service.join import remove_node
from headway.cluster.service.messages import NodeOrders, NodeReport
from headway.cluster.service.node_agent import read_settings, trust_service
from headway.cluster.service.node_certificate import AGAIN_S, NodeCertificate
from headway.cluster.service.node_process import run_agent
from headway.cluster.service.peer_certificate import PEER
from headway.cluster.service.renewals import MOST_OF_NODE, NodeCertificates
from headway.errors import EngineError, EngineUnreachable, UnknownNode, UsageError

service = test_node_connections.service
DAY_S = 86400.0
REPORT = {"report": {"node": "m1"}}


def kept(folder: Path, now: list[float]) -> NodeCertificate:
    return NodeCertificate(folder / "certificate.pem", folder / "node.key", "m1", lambda: now[0])


def read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_certificate_is_renewed_before_its_end_and_the_old_one_stays_valid(service: tuple[Served, Cluster]) -> None:
    served, cluster = service
    folder, now = join(served, cluster, "m1"), [time.time()]
    join(served, cluster, "m2")
    file, old = folder / "certificate.pem", folder / "old.pem"
    old.write_bytes(file.read_bytes())
    mine = kept(folder, now)
    connection = served.connect(certificate=file, keep=True)
    now[0] += 2 / 3 * NODE_VALID.total_seconds() - 2 * DAY_S
    assert not mine.keep_valid(connection)
    assert file.read_bytes() == old.read_bytes()
    now[0] += 3 * DAY_S
    assert mine.keep_valid(connection)
    assert not mine.keep_valid(connection)
    assert read(file).public_key() != read(old).public_key()
    assert read(file).subject == read(old).subject
    assert file.stat().st_mode & 0o777 == 0o600
    assert connection.post("/api/v1/sync", REPORT)["orders"]["starts"] == []
    assert served.connect(certificate=old).post("/api/v1/sync", REPORT)["orders"]["starts"] == []
    with pytest.raises(UsageError, match="another certificate"):
        connection.post("/api/v1/sync", {"report": {"node": "m2"}})
    next_service = NodeCertificates(cluster.store)
    first = fingerprint_of(read(old))
    assert [next_service.shown({PEER: fingerprint_of(read(at))}) for at in (file, old)] == [first, first]
    served.connect(USER).delete(node_path("m1"))
    with pytest.raises(UnknownNode):
        connection.post("/api/v1/sync", REPORT)
    (folder / "node.json").unlink()
    renewed = folder / "renewed.pem"
    file.rename(renewed)
    join(served, cluster, "m1")
    for revoked in (old, renewed):
        gone = served.connect(certificate=revoked)
        with pytest.raises(UsageError, match="another certificate"):
            gone.post("/api/v1/sync", REPORT)
        with pytest.raises(UsageError, match="is of no node: it was replaced or removed"):
            gone.post("/api/v1/renew-certificate", {"request": request_for_key(new_key(), "m1")})
    with pytest.raises(UsageError, match="refused the token"):
        served.connect(USER).post("/api/v1/renew-certificate", {"request": request_for_key(new_key(), "m1")})


def test_agent_renews_the_certificate_of_its_node_while_it_reports(
    service: tuple[Served, Cluster], capfd: pytest.CaptureFixture[str]
) -> None:
    served, cluster = service
    folder, now = join(served, cluster, "m1"), [time.time() + NODE_VALID.total_seconds() - 2 * DAY_S]
    file, reported = folder / "certificate.pem", list[str | None]()
    before = file.read_bytes()
    sync = cluster.plane.reports.sync

    def watch(report: NodeReport, peer: str | None = None) -> NodeOrders:
        reported.append(peer)
        return sync(report, peer)

    cluster.plane.reports.sync = watch  # type: ignore[method-assign]
    rounds = iter(range(50))
    with closing(served.connect(certificate=file, keep=True)) as connection:
        done = run_agent(
            "m1", folder, connection, lambda: not reported and next(rounds) < 49, certificate=kept(folder, now)
        )
    assert done == 0
    assert file.read_bytes() != before
    assert reported == [fingerprint_of(x509.load_pem_x509_certificate(before))]  # as whom it is still known
    assert "node m1: its certificate is renewed" in capfd.readouterr().err


class Answers:
    """A connection whose requests are answered by a function."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer, self.asked = answer, 0

    def post(self, _: str, body: dict[str, str]) -> Any:
        self.asked += 1
        return self.answer(body["request"])

    def close(self) -> None:
        pass


def joined(folder: Path, began: float) -> Path:
    """The folder of a node that has joined at a time."""
    folder.mkdir()
    authority = Authority(folder / "tls", lambda: began)
    certificate(folder, authority, "m1").rename(folder / "certificate.pem")
    (folder / "m1.key").rename(folder / "node.key")
    return folder


def test_failed_renewal_leaves_the_certificate_and_is_tried_again_later(tmp_path: Path) -> None:
    folder, now = joined(tmp_path / "m1", 1e9), [1e9 + NODE_VALID.total_seconds() - DAY_S]
    before, mine = (folder / "certificate.pem").read_bytes(), kept(folder, now)

    def unreachable(_: str) -> Any:
        raise EngineUnreachable("the service does not answer")

    def another(_: str) -> Any:
        request = read_request(request_for_key(new_key(), "m1"))
        return {"certificate": pem(Authority(folder / "tls").sign_node("m1", request))}

    for answer, words in ((unreachable, "does not answer"), (another, "has signed another key")):
        connection: Any = Answers(answer)
        with pytest.raises(EngineError, match=words):
            mine.keep_valid(connection)
        assert not mine.keep_valid(connection)
        assert connection.asked == 1
        assert (folder / "certificate.pem").read_bytes() == before
        now[0] += AGAIN_S
    now[0] += 2 * DAY_S
    with pytest.raises(EngineError, match="certificate ended on 2002-09-09: headway node token --replace m1"):
        mine.keep_valid(connection)


def pem(signed: x509.Certificate) -> str:
    from headway.cluster.service.certificates import certificate_pem

    return certificate_pem(signed)


def test_certificate_and_key_of_an_older_version_become_one_file(tmp_path: Path) -> None:
    folder = joined(tmp_path / "m1", 1e9)
    file, key = folder / "certificate.pem", folder / "node.key"
    file.write_text(pem(read(file)))
    kept(folder, [1e9])
    assert file.read_text() == pem(read(file)) + key.read_text()
    file.unlink()
    with pytest.raises(EngineError, match="cannot read"):
        kept(folder, [1e9])


def test_node_gets_a_certificate_of_its_own_name_only(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.admit("m1", "m2")
    request = request_for_key(new_key(), "m2")
    scope = {PEER: cluster.peers["m1"]}
    for round_ in range(2 * MOST_OF_NODE):
        text = cluster.plane.certificates.renew(cluster.authority, scope, request, cluster.now)
        signed = x509.load_pem_x509_certificate(text.encode())
        assert signed.subject.rfc4514_string() == "CN=m1"
        if round_ == 0:
            scope = {PEER: fingerprint_of(signed)}  # it uses this one from now on
    known = NodeCertificates(cluster.store)
    assert len(known._first) == MOST_OF_NODE + 1
    assert known.shown(scope) == cluster.peers["m1"]
    remove_node(cluster.plane, cluster.store, "m1")
    with pytest.raises(UsageError, match="is of no node"):
        known.renew(cluster.authority, scope, request, cluster.now)
    with pytest.raises(UsageError, match="is of no node"):
        known.renew(cluster.authority, {}, request, cluster.now)
    cluster.now = time.time() + 2 * NODE_VALID.total_seconds()
    known.renew(cluster.authority, {PEER: cluster.peers["m2"]}, request, cluster.now)
    assert len(NodeCertificates(cluster.store)._first) == 1  # those that have ended are forgotten
    cluster.store.close()


def test_authority_is_signed_again_for_its_key_before_it_ends(tmp_path: Path) -> None:
    now = [1e9]
    authority = Authority(tmp_path, lambda: now[0])
    first, node = read(authority.file), authority.sign_node("m1", read_request(request_for_key(new_key(), "m1")))
    now[0] += 2 / 3 * VALID.total_seconds() - 2 * DAY_S
    Authority(tmp_path, lambda: now[0])
    assert read(authority.file) == first
    now[0] += 3 * DAY_S
    Authority(tmp_path, lambda: now[0])
    again = read(authority.file)
    assert again.not_valid_after_utc > first.not_valid_after_utc
    assert again.public_key() == first.public_key()
    node.verify_directly_issued_by(again)


def test_cluster_works_after_the_ends_of_its_first_certificates(tmp_path: Path) -> None:
    """The service's own is pinned, so its date does not count; the authority's is renewed."""
    began = time.time() - 2 * VALID.total_seconds()
    Authority(tmp_path / "tls", lambda: began).server(tmp_path / "tls", ["localhost", "127.0.0.1"])

    async def answer(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    for url, fingerprint, authority in serve(answer, tmp_path):
        assert read(tmp_path / "tls" / "server.pem").not_valid_after_utc.timestamp() < time.time()
        mine = certificate(tmp_path, authority, "m1")
        assert ServiceConnection(url, None, fingerprint=fingerprint, certificate=mine).get("/") == {}
        authority._clock = lambda: time.time() - 2 * NODE_VALID.total_seconds()
        ended = certificate(tmp_path, authority, "m2")
        with pytest.raises(EngineUnreachable, match="does not answer"):
            ServiceConnection(url, None, fingerprint=fingerprint, certificate=ended).get("/")


def test_node_is_told_of_another_certificate_of_its_service(service: tuple[Served, Cluster]) -> None:
    served, cluster = service
    folder = join(served, cluster, "m1")
    assert trust_service(folder, "ab" * 32).fingerprint == served.fingerprint
    settings = read_settings(folder)
    assert settings.fingerprint == "ab" * 32
    with pytest.raises(EngineError, match="has the fingerprint"):
        served.connect(fingerprint=settings.fingerprint, certificate=folder / "certificate.pem").post("/api/v1/sync")
