"""Verbs of the service as its users type them: what each role sees, and what is said to mistakes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from access_world import AccessWorld, access_world, submission
from fastapi.testclient import TestClient
from service_verbs import URL, Terminal

from headway.cluster.service.connection import ServiceConnection
from headway.dashboard import make_app


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AccessWorld]:
    with access_world(tmp_path) as world:
        yield world


@pytest.fixture
def terminal(
    world: AccessWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Terminal:
    return Terminal(world, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("user", ["red-viewer", "red-admin"])
def test_cluster_pages_show_who_is_no_admin_its_own_tenants(
    world: AccessWorld, terminal: Terminal, tmp_path: Path, user: str
) -> None:
    mine, other = world.submit("red-member"), world.submit("blue-member")
    world.cycle()
    (tmp_path / "runs").mkdir()
    app = make_app(tmp_path / "runs", "t" * 32, service=lambda: ServiceConnection(URL, world.tokens[user]))
    with TestClient(app, base_url="http://127.0.0.1:8321") as browser:
        browser.headers["authorization"] = f"Bearer {'t' * 32}"
        page = browser.get("/api/cluster").json()
        timeline = browser.get("/api/cluster/timeline").json()
        job = browser.get("/api/cluster/job", params={"job": mine}).json()
    assert [node["name"] for node in page["nodes"]] == ["n1", "n2"]
    assert [row["id"] for row in page["jobs"]] == [mine]
    assert {row["name"] for row in page["tenants"]} == {"red", "red-a"}
    assert mine in {event["job"] for event in page["newest"]}
    assert other not in {event["job"] for event in timeline["events"]}
    assert (timeline["jobs"], job["spans"]) == ([], []), "spans are of the record, which is for admins"
    assert timeline["refusal"]


FORBIDDEN = (
    ("red-admin", "PUT", "/api/v1/users/eve", {"role": "admin", "tenant": None}),
    ("red-admin", "PUT", "/api/v1/users/eve", {"role": "member", "tenant": "blue"}),
    ("red-admin", "PUT", "/api/v1/users/blue-member", {"role": "member", "tenant": "red"}),
    ("red-admin", "DELETE", "/api/v1/users/blue-member", None),
    ("red-admin", "PUT", "/api/v1/tenants/blue", {"guarantee": 0}),
    ("red-admin", "PUT", "/api/v1/tenants/red", {"guarantee": 9}),
    ("red-admin", "DELETE", "/api/v1/tenants/blue", None),
    ("red-admin", "PUT", "/api/v1/tenants/red-b", {"parent": "blue"}),
    ("red-member", "PUT", "/api/v1/secrets/blue/KEY", {"value": "marker-of-a-secret"}),
    ("red-member", "POST", "/api/v1/tokens", {"user": "red-admin"}),
    ("red-member", "DELETE", "/api/v1/tokens/nosuch", None),
    ("red-member", "POST", "/api/v1/jobs", submission("blue")),
    ("red-member", "POST", "/api/v1/jobs/BLUE/cancel", None),
    ("red-a-member", "POST", "/api/v1/jobs/RED/cancel", None),
)


def test_attempts_at_what_is_not_ones_own_are_in_the_audit_log(world: AccessWorld) -> None:
    jobs = {"BLUE": world.submit("blue-member"), "RED": world.submit("red-member")}
    for user, method, path, body in FORBIDDEN:
        for word, job in jobs.items():
            path = path.replace(word, job)
        assert world.ask(user, method, path, body).status_code == 400, (user, method, path)
        newest = world.ask("root", "GET", "/api/v1/audit").json()[-1]
        assert (newest["user"], newest["target"], newest["outcome"]) == (user, path, "refused")
        assert newest["detail"]
        assert "marker" not in json.dumps(newest)


def test_audit_log_does_not_tell_whether_others_have_a_job(world: AccessWorld) -> None:
    job = world.submit("blue-member")
    for name in (job, "nosuch"):
        world.ask("red-member", "POST", f"/api/v1/jobs/{name}/cancel")
    entries = world.ask("red-admin", "GET", "/api/v1/audit").json()[-2:]
    assert [entry["detail"] for entry in entries] == [f"no job '{job}'", "no job 'nosuch'"]


def test_own_mistakes_are_no_refused_attempts(world: AccessWorld) -> None:
    entries = world.ask("root", "GET", "/api/v1/audit").json()
    assert world.ask("root", "DELETE", "/api/v1/users/nosuch").status_code == 400
    assert world.ask("red-member", "GET", "/api/v1/jobs/nosuch").status_code == 400
    assert world.ask("root", "GET", "/api/v1/audit").json() == entries


def test_budget_of_an_unknown_tenant_makes_none(world: AccessWorld, terminal: Terminal) -> None:
    for words in (("blu", "5"), ("blu",)):
        printed = terminal.type("root", "budget", *words)
        assert printed.status == 2
        assert "unknown tenant 'blu'" in printed.err
        assert "did you mean blue?" in printed.err
    assert set(world.plane.cluster.tenants) == {"red", "red-a", "blue"}
    assert terminal.type("root", "budget", "blue", "5").status == 0
    assert "0.0 of 5" in terminal.type("root", "budget", "blue").out


def test_tenants_are_listed_below_their_parents(world: AccessWorld, terminal: Terminal) -> None:
    for name, parent in (("blue-a", "blue"), ("red-b", "red"), ("red-a-1", "red-a")):
        assert terminal.type("root", "tenants", "set", name, "--parent", parent).status == 0
    lines = terminal.type("root", "tenants").out.splitlines()[1:-1]
    names = [line[: len(line) - len(line.lstrip())] + line.split()[0] for line in lines]
    assert names == ["red", "  red-a", "    red-a-1", "  red-b", "blue", "  blue-a"]


@pytest.mark.parametrize("verb", ["logs", "cancel"])
def test_unknown_job_is_not_blamed_on_the_folder_of_runs(terminal: Terminal, verb: str) -> None:
    printed = terminal.type("red-member", verb, "4711")
    assert printed.status == 2
    assert "no job of the service and no run is called '4711'" in printed.err
    assert "headway queue lists jobs" in printed.err


def test_events_of_an_unknown_job_are_an_error(world: AccessWorld, terminal: Terminal) -> None:
    job = world.submit("red-member", name="known")
    world.cycle()
    printed = terminal.type("red-member", "events", "--job", "nosuch")
    assert (printed.status, printed.out) == (2, "")
    assert "no job 'nosuch'" in printed.err
    for name in (job, "known"):
        assert f"job {job} (known)" in terminal.type("red-member", "events", "--job", name).out


def test_join_token_is_written_for_its_user_only(world: AccessWorld, terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "gpu.token"
    printed = terminal.type("root", "node", "token", "--out", str(file))
    assert (printed.status, file.stat().st_mode & 0o777) == (0, 0o600)
    token = file.read_text().strip()
    assert len(token) >= 16
    assert token not in printed.out
    assert terminal.type("root", "node", "token", "--out", str(file)).status == 2, "it is not overwritten"
    assert file.read_text().strip() == token
    shown = json.loads(terminal.type("root", "node", "token", "--json", "--out", str(tmp_path / "b.token")).out)
    assert shown["file"] == str(tmp_path / "b.token")
    assert "token" not in shown


def test_login_says_which_service_the_verbs_ask(world: AccessWorld, terminal: Terminal, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(world.tokens["red-member"])
    words = ("login", URL, "--token-file", str(token))
    assert "note:" not in terminal.type("red-member", *words).out
    folder = tmp_path / "runs" / ".service"
    folder.mkdir(parents=True)
    (folder / "service.json").write_text(json.dumps({"url": "http://127.0.0.1:9999"}))
    printed = terminal.type("red-member", *words).out
    assert f"{tmp_path / 'runs'}, verbs still ask the service that was started there: http://127.0.0.1:9999" in printed
    assert json.loads(terminal.type("red-member", *words, "--json").out)["asked_instead"] == "http://127.0.0.1:9999"


def test_node_that_another_tenant_uses_is_busy(world: AccessWorld, terminal: Terminal) -> None:
    world.submit("blue-member", gpus=4)
    world.cycle()
    rows = json.loads(terminal.type("red-member", "nodes", "--engine", "service", "--json").out)
    assert sorted((row["state"], row["gpus_free"]) for row in rows) == [("busy", 0), ("free", 4)]


def test_key_of_a_submission_stands_for_one_request(world: AccessWorld, terminal: Terminal, tmp_path: Path) -> None:
    submit = ("submit", "--key", "nightly", "--name", "train")
    first = json.loads(terminal.type("red-member", *submit, "--json", "--", "echo", "one").out)
    again = terminal.type("red-member", *submit, "--", "echo", "one")
    assert f"already submitted as job {first['job']} (train)" in again.out
    assert json.loads(terminal.type("red-member", *submit, "--json", "--", "echo", "one").out)["repeated"]
    for words in (("--", "echo", "two"), ("--cpus", "2", "--", "echo", "one")):
        other = terminal.type("red-member", *submit, *words)
        assert (other.status, other.out) == (2, "")
        assert f"job {first['job']} (train) has the same key and another" in other.err
    assert len(list((tmp_path / "runs" / ".commands").iterdir())) == 1, "no folder is left by what was not queued"
    assert [row["id"] for row in world.ask("root", "GET", "/api/v1/jobs").json()] == [first["job"]]


@pytest.mark.parametrize(
    ("user", "words", "sentence"),
    [
        ("root", "users set eve --role boss --tenant red", "role 'boss': one of viewer, member, tenant-admin or admin"),
        ("red-member", "tokens add --scope all", "scopes 'all': one of read, jobs or manage"),
        ("red-member", "tokens add --expires 9000d", "--expires 9000d is too long"),
        ("red-viewer", "users", "viewer 'red-viewer' may not read users: that takes the role tenant-admin or above"),
        ("red-admin", "node cordon n1", "tenant-admin 'red-admin' may not change nodes: that takes the role admin"),
    ],
)
def test_mistakes_are_said_in_the_words_of_who_typed(terminal: Terminal, user: str, words: str, sentence: str) -> None:
    printed = terminal.type(user, *words.split())
    assert (printed.status, printed.out) == (2, "")
    assert sentence in printed.err
    assert "api/v1" not in printed.err
    assert "body" not in printed.err


def test_missed_bounds_name_the_bound_and_no_secret_is_quoted(world: AccessWorld) -> None:
    def error(path: str, body: object, method: str = "POST") -> str:
        answer = world.ask("root", method, path, body)
        assert answer.status_code == 422
        return str(answer.json()["error"])

    assert error("/api/v1/tokens", {"lifetime_s": 5}) == "lifetime_s 5: at least 60"
    assert error("/api/v1/jobs", {}) == "request: this is missing"
    assert error("/api/v1/jobs", {"request": {}, "colour": 1}) == "colour: there is no such field"
    secret = error("/api/v1/secrets/red/KEY", {"value": ["marker-of-a-secret"]}, "PUT")
    assert "marker" not in secret
