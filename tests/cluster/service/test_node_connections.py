"""Connections over TLS: whom clients trust, whom the service knows, and which code goes to which node."""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from test_node_joining import Cluster

from eventually import eventually
from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service import isolation, uploaded_code
from headway.cluster.service.app import make_app
from headway.cluster.service.certificates import Authority, certificate_pem, read_request, server_tls, signing_request
from headway.cluster.service.cgroups import Cgroups
from headway.cluster.service.connection import ServiceConnection, node_path, read_fingerprint
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.node_agent import NodeSettings, join_cluster, read_settings, run_node
from headway.cluster.service.peer_certificate import PEER, PeerCertificateProtocol
from headway.cluster.service.uploaded_code import CodeStore, cached, unpack
from headway.cluster.submit import upload
from headway.cluster.submit.upload import pack_folder
from headway.errors import EngineError, UnknownNode, UsageError
from headway.http_server import listen

USER, NODE = "u" * 32, "n" * 32


@dataclass
class Served:
    """A server in a thread, and what it was asked."""

    url: str
    fingerprint: str
    authority: Authority
    asked: list[str] = field(default_factory=list)

    def connect(self, token: str | None = None, **options: Any) -> ServiceConnection:
        return ServiceConnection(self.url, token, **{"fingerprint": self.fingerprint, **options})


def serve(app: Any, folder: Path) -> Iterator[tuple[str, str, Authority]]:
    authority = Authority(folder / "tls")
    tls = authority.server(folder / "tls", ["localhost", "127.0.0.1"])
    listener = listen("127.0.0.1", 0)
    options: dict[str, Any] = tls.options()
    config = uvicorn.Config(app, lifespan="off", log_level="critical", http=PeerCertificateProtocol, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    eventually(lambda: server.started)
    yield f"https://127.0.0.1:{listener.getsockname()[1]}", tls.fingerprint, authority
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    asked = list[str]()

    async def tell_peer(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        body = json.dumps(scope.get(PEER)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    for url, fingerprint, authority in serve(tell_peer, tmp_path):
        yield Served(url, fingerprint, authority, asked)


def certificate(folder: Path, authority: Authority, name: str) -> Path:
    """A node's certificate with its key."""
    request, key = signing_request(folder / f"{name}.key", name), folder / f"{name}.key"
    file = folder / f"{name}.pem"
    file.write_text(certificate_pem(authority.sign_node(name, read_request(request))) + key.read_text())
    return file


def test_client_sends_nothing_to_another_fingerprint(served: Served) -> None:
    assert served.connect("secret").get("/a") is None
    with pytest.raises(EngineError, match="has the fingerprint"):
        served.connect("secret", fingerprint="0" * 64).get("/b")
    with pytest.raises(EngineError, match="is not trusted"):
        served.connect("secret", fingerprint=None).get("/c")
    assert served.asked == ["/a"]


def test_service_knows_who_has_shown_a_certificate_of_its_authority(served: Served, tmp_path: Path) -> None:
    file = certificate(tmp_path, served.authority, "m1")
    kept = served.connect(certificate=file, keep=True)
    expected = hashlib.sha256(bytes_of(file)).hexdigest()
    assert [kept.get("/"), kept.get("/"), served.connect().get("/")] == [expected, expected, None]
    kept.close()
    stranger = certificate(tmp_path, Authority(tmp_path / "other"), "m2")
    with pytest.raises(EngineError, match="does not answer"):
        served.connect(certificate=stranger).get("/")
    assert len(served.asked) == 3


def bytes_of(file: Path) -> bytes:
    return x509.load_pem_x509_certificate(file.read_bytes()).public_bytes(Encoding.DER)


def test_keys_are_private_and_certificates_stay(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    first = authority.server(tmp_path / "tls", ["localhost", "10.0.0.1"])
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").glob("*.key")} == {0o600}
    again = Authority(tmp_path / "tls")
    assert again.server(tmp_path / "tls", ["10.0.0.1"]).fingerprint == first.fingerprint
    assert again.server(tmp_path / "tls", ["10.0.0.2"]).fingerprint != first.fingerprint
    with pytest.raises(UsageError, match="no certificate and its key"):
        server_tls(authority.file, first.key, authority.file)
    (tmp_path / "tls" / "ca.key").unlink()
    with pytest.raises(EngineError, match="cannot read the service's authority"):
        Authority(tmp_path / "tls")


@pytest.mark.parametrize("text", ["ab" * 32, "AB:" * 31 + "AB", "sha256:" + "ab" * 32, f" {'ab' * 32}\n"])
def test_fingerprint_may_be_written_as_tools_do(text: str) -> None:
    assert read_fingerprint(text) == "ab" * 32


@pytest.mark.parametrize("text", ["", "ab" * 31, "xy" * 32])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no fingerprint"):
        read_fingerprint(text)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Served, Cluster]]:
    cluster = Cluster(tmp_path)
    live = LiveService(cluster.store, cluster.plane, print, cluster.decider)  # type: ignore[arg-type]
    app = make_app(live, USER, NODE, "127.0.0.1", authority=cluster.authority, code=CodeStore(tmp_path / "code"))
    for url, fingerprint, authority in serve(app, tmp_path):
        yield Served(url, fingerprint, authority), cluster
    cluster.store.close()


def join(served: Served, cluster: Cluster, name: str) -> Path:
    """Join as the verb does, and return the node's folder."""
    folder = cluster.folder / name
    token = served.connect(USER).post("/api/v1/join-tokens", {})["token"]
    spec = {"name": name, "chip": "fake", "gpus": ["a"], "cpus": 2, "memory_bytes": 2**30, "tenants": ["red"]}
    join_cluster(folder, NodeSettings(served.url, name, served.fingerprint, spec, jobs_as_root=True), token)
    return folder


def test_node_joins_reports_by_its_certificate_and_gets_its_jobs_code(service: tuple[Served, Cluster]) -> None:
    served, cluster = service
    folders = {name: join(served, cluster, name) for name in ("m1", "m2")}
    assert read_settings(folders["m1"]).spec["tenants"] == ["red"]
    with pytest.raises(UsageError, match="belongs to node 'm1'"):
        join(served, cluster, "m1")
    one, two = (served.connect(certificate=at / "certificate.pem") for at in folders.values())
    assert one.post("/api/v1/sync", {"report": {"node": "m1"}})["orders"]["starts"] == []
    with pytest.raises(UsageError, match="another certificate"):
        one.post("/api/v1/sync", {"report": {"node": "m2"}})
    with pytest.raises(UsageError, match="another certificate"):
        served.connect(NODE).post("/api/v1/sync", {"report": {"node": "m1"}})
    with pytest.raises(UsageError, match="speaks version 7"):
        one.post("/api/v1/sync", {"report": {"node": "m1"}, "protocol": 7})
    for token in (None, USER):
        with pytest.raises(UsageError, match="refused the token"):
            served.connect(token).post("/api/v1/sync", {"report": {"node": "m1"}})
    with pytest.raises(UsageError, match="refused the token"):
        one.get("/api/v1/jobs")
    (cluster.folder / "source").mkdir()
    (cluster.folder / "source" / "train.py").write_text("print(1)\n")
    digest, data = pack_folder(cluster.folder / "source")
    user = served.connect(USER)
    user.put_bytes(f"/api/v1/code/{digest}", data)
    with pytest.raises(UsageError, match="the uploaded code is not 000"):
        user.put_bytes(f"/api/v1/code/{'0' * 64}", data)
    request = LaunchRequest("job", ("true",), Path("/tmp"), gpus=1, site={"tenant": "red", "code": digest})
    user.post("/api/v1/jobs", {"request": request_to_json(request)})
    cluster.cycle()
    assert len(one.post("/api/v1/sync", {"report": {"node": "m1"}})["orders"]["starts"]) == 1
    assert one.get_bytes(f"/api/v1/code/{digest}") == data
    with pytest.raises(UsageError, match="no job on this node has code"):
        two.get_bytes(f"/api/v1/code/{digest}")
    with pytest.raises(UsageError, match="refused the token"):
        user.get_bytes(f"/api/v1/code/{digest}")


def test_agent_of_a_removed_node_ends_and_says_how_to_join_again(
    service: tuple[Served, Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, cluster = service
    folder, groups = join(served, cluster, "m1"), tmp_path / "groups"
    (groups / "1-1-0").mkdir(parents=True)
    monkeypatch.setattr(isolation, "find_cgroups", lambda _: Cgroups(1, dict.fromkeys(("cpu", "pids"), groups)))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    served.connect(USER).delete(node_path("m1"))
    for _ in range(2):  # it ends, and headway node run does not start it again
        with pytest.raises(UnknownNode, match=r"^https://.*: unknown node 'm1': it was removed$") as ended:
            run_node(folder)
        assert ended.value.hint == f"to join again: rm {folder}/node.json, then headway node join with a new token"
    assert not groups.exists()
    (folder / "node.json").unlink()
    join(served, cluster, "m1")
    assert served.connect(certificate=folder / "certificate.pem").post("/api/v1/sync", {"report": {"node": "m1"}})[
        "orders"
    ]


def test_local_agent_is_started_again_unless_its_node_was_removed(tmp_path: Path) -> None:
    cluster, log = Cluster(tmp_path), list[str]()
    live = LiveService(cluster.store, cluster.plane, log.append, cluster.decider)  # type: ignore[arg-type]
    ends = [[sys.executable, "-c", f"raise SystemExit({status})"] for status in (1, UnknownNode.exit_status)]
    live._agents["n1"] = ends[1], subprocess.Popen(ends[0])
    live._threads[1].start()
    eventually(lambda: not live._agents)
    live.stopping.set()
    live._threads[1].join()
    assert log == ["the agent of node n1 ended with status 1; starting another"]
    cluster.store.close()


def test_nodes_cannot_join_a_service_without_tls(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not https"):
        join_cluster(tmp_path / "n", NodeSettings("http://127.0.0.1:1", "m1", None, {}), "t" * 32)


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        for entry, data in entries:
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = {
    "absolute": archive((entry("/tmp/evil"), b"x")),
    "parent": archive((entry("../evil"), b"x")),
    "parent inside": archive((entry("a/../../evil"), b"x")),
    "symbolic link": archive((entry("link", tarfile.SYMTYPE, "/etc"), b""), (entry("link/evil"), b"x")),
    "hard link": archive((entry("link", tarfile.LNKTYPE, "/etc/passwd"), b"")),
    "device": archive((entry("null", tarfile.CHRTYPE), b"")),
    "pipe": archive((entry("pipe", tarfile.FIFOTYPE), b"")),
    "twice": archive((entry("a"), b"x"), (entry("a"), b"y")),
    "file as folder": archive((entry("a"), b"x"), (entry("a/b"), b"y")),
    "not gzip": b"hello",
    "not tar": gzip.compress(b"hello" * 1000),
    "cut off": archive((entry("a"), b"x" * 100_000))[:-20],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_and_leave_nothing_outside(tmp_path: Path, case: str) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(UsageError, match="the uploaded code"):
        unpack(HOSTILE[case], tmp_path / "base" / "code")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["code"]
    assert not (tmp_path / "evil").exists()
    assert not Path("/tmp/evil").exists()


def test_archives_are_limited_unpacked_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded_code, "MOST_UNPACKED", 2**20)
    with pytest.raises(UsageError, match="more than"):
        unpack(archive((entry("zeros"), bytes(2**20 + 1))), tmp_path / "a")
    monkeypatch.setattr(uploaded_code, "MOST_FILES", 3)
    with pytest.raises(UsageError, match="more than 3 files"):
        unpack(archive(*((entry(f"{number}"), b"") for number in range(4))), tmp_path / "b")
    monkeypatch.setattr(upload, "MOST_BYTES", 2**10)
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "random").write_bytes(hashlib.shake_256(b"").digest(2**16))
    with pytest.raises(UsageError, match="too large to upload"):
        pack_folder(tmp_path / "large")


def test_folder_arrives_as_it_was_and_only_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "package" / ".git").mkdir(parents=True)
    (source / "package" / "a.py").write_text("A = 1\n")
    (source / "run.sh").write_text("echo\n")
    (source / "run.sh").chmod(0o755)
    (source / "package" / ".git" / "secret").write_text("x")
    digest, data = pack_folder(source)
    (source / "run.sh").touch()
    assert pack_folder(source) == (digest, data)
    (source / "run.sh").write_text("echo 2\n")
    assert pack_folder(source)[0] != digest
    fetched = list[str]()

    def fetch(wanted: str) -> bytes:
        fetched.append(wanted)
        return data

    store = CodeStore(tmp_path / "store")
    for number in range(2):
        unpack(cached(store, digest, fetch), tmp_path / f"copy-{number}")
    assert fetched == [digest]
    copy = tmp_path / "copy-1"
    files = {str(path.relative_to(copy)): path.stat().st_mode & 0o111 for path in copy.rglob("*") if path.is_file()}
    assert files == {"package/a.py": 0, "run.sh": 0o100}
    assert (copy / "package" / "a.py").read_text() == "A = 1\n"
    for bad in ("../../etc/passwd", "AB" * 32, ""):
        with pytest.raises(UsageError, match="no SHA-256"):
            store.get(bad)
