"""The key of stored secrets and its replacement, also when it is broken off; secrets of tenants above."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from access_world import NOW, AccessWorld, access_world, submission
from service_verbs import Terminal

from headway.cluster.service.faults import WritePoints
from headway.cluster.service.messages import NodeReport
from headway.cluster.service.secret_keys import KEY_FILE, NEXT_FILE, OLD_VARIABLE, VARIABLE, SecretKeys, key_id
from headway.cluster.service.secret_store import SecretStore
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url
from headway.errors import UsageError

VALUES = {("red", "A"): "one", ("red", "B"): "two", ("blue", "A"): "three"}


class Crash(BaseException):
    """The process dies here."""


class CrashAt(WritePoints):
    """Dies at a place; counts and names the others."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.places = at, list[str]()

    def reach(self, place: str) -> None:
        """See WritePoints."""
        self.places.append(place)
        if len(self.places) - 1 == self.at:
            raise Crash(place)


def opened(folder: Path, points: WritePoints | None = None) -> ServiceStore:
    return ServiceStore(open_database(sqlite_url(folder / "control.db")), points)


def fill(store: ServiceStore, secrets: SecretStore) -> None:
    with store.write() as transaction:
        for (tenant, name), value in VALUES.items():
            secrets.set(transaction, tenant, name, value, user="ann", now=NOW)


def stored(store: ServiceStore, secrets: SecretStore) -> dict[tuple[str, str], str]:
    """All values that can be opened."""
    with store.read() as connection:
        values = {(tenant, name): secrets.values(connection, "1", (tenant,), [name]) for tenant, name in VALUES}
    return {(tenant, name): value[name] for (tenant, name), value in values.items() if value is not None}


def key_in(file: Path) -> bytes:
    return base64.b64decode(file.read_text())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServiceStore]:
    store = opened(tmp_path)
    yield store
    store.close()


def test_key_is_private_and_stays(store: ServiceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SecretKeys(tmp_path, store)
    key = key_in(tmp_path / KEY_FILE)
    SecretKeys(tmp_path, store)
    assert key_in(tmp_path / KEY_FILE) == key
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UsageError, match="HEADWAY_SECRETS_KEY is no key"):
        SecretKeys(tmp_path, store)


def test_new_key_opens_everything_and_the_old_one_nothing(store: ServiceStore, tmp_path: Path) -> None:
    keys, notes = SecretKeys(tmp_path, store), list[str]()
    old = key_in(tmp_path / KEY_FILE)
    fill(store, keys.secrets)
    counts = keys.rekey()
    assert (counts.tenants, counts.jobs, counts.unreadable) == (3, 0, 0)
    new = key_in(tmp_path / KEY_FILE)
    assert new != old
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / NEXT_FILE).exists()
    assert stored(store, keys.secrets) == stored(store, SecretStore(new)) == VALUES
    assert stored(store, SecretStore(old)) == {}
    fill(store, keys.secrets)  # what is set from now on, too
    assert stored(store, SecretStore(new)) == VALUES
    SecretKeys(tmp_path, store, note=notes.append)
    assert notes == []
    (tmp_path / KEY_FILE).write_text(base64.b64encode(old).decode())
    lost = SecretKeys(tmp_path, store, note=notes.append)
    assert "another key" in notes[0]
    fill_one = lost.rekey()
    assert fill_one.unreadable == 3


POINTS = ("key written", "before commit", "after commit", "sealed with the key", "key replaced")


@pytest.mark.parametrize("at", range(len(POINTS)))
def test_crash_at_any_write_of_a_change_of_keys_loses_no_secret(tmp_path: Path, at: int) -> None:
    points = CrashAt()
    store = opened(tmp_path, points)
    keys = SecretKeys(tmp_path, store, points)
    fill(store, keys.secrets)
    points.places, points.at = [], at
    with pytest.raises(Crash, match=POINTS[at]):
        keys.rekey()
    assert points.places == list(POINTS[: at + 1])
    store.close()
    for crash_again in (True, False):  # the next start may die, too
        points = CrashAt()
        store = opened(tmp_path, points)
        points.places, points.at = [], 0 if crash_again else None
        try:
            keys = SecretKeys(tmp_path, store, points)
        except Crash:
            store.close()
            continue
        assert stored(store, keys.secrets) == VALUES
        points.at = None
        fill(store, keys.secrets)
        assert not (tmp_path / NEXT_FILE).exists()
        assert stored(store, SecretStore(key_in(tmp_path / KEY_FILE))) == VALUES
        keys.rekey()
        assert stored(store, SecretStore(key_in(tmp_path / KEY_FILE))) == VALUES
        store.close()


def test_change_that_was_broken_off_is_settled_by_the_next_one(store: ServiceStore, tmp_path: Path) -> None:
    points = CrashAt()
    keys = SecretKeys(tmp_path, store, points)
    fill(store, keys.secrets)
    points.places, points.at = [], 1
    with pytest.raises(Crash, match="sealed with the key"):
        keys.rekey()
    points.at = None
    fill(store, keys.secrets)
    secrets = keys.secrets
    keys.rekey()
    assert keys.secrets is secrets  # those who hold it seal with the newest key
    assert stored(store, SecretStore(key_in(tmp_path / KEY_FILE))) == VALUES


def test_key_in_a_variable_is_replaced_by_a_start_with_both(
    store: ServiceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
    monkeypatch.setenv(VARIABLE, old)
    keys = SecretKeys(tmp_path, store)
    fill(store, keys.secrets)
    with pytest.raises(UsageError, match=r"key of secrets is in \$HEADWAY_SECRETS_KEY") as refused:
        keys.rekey()
    assert OLD_VARIABLE in str(refused.value.hint)
    for _ in range(2):  # it may be started so again
        monkeypatch.setenv(VARIABLE, new)
        monkeypatch.setenv(OLD_VARIABLE, old)
        keys = SecretKeys(tmp_path, store)
        assert stored(store, SecretStore(base64.b64decode(new))) == VALUES
    assert not list(tmp_path.glob("secrets.key*"))


def test_id_of_a_key_tells_keys_apart() -> None:
    assert key_id(b"a" * 32) == key_id(b"a" * 32) != key_id(b"b" * 32)


# -- through the service


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccessWorld]:
    with access_world(tmp_path_factory.mktemp("service")) as world:
        yield world


@pytest.fixture
def terminal(
    world: AccessWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Terminal:
    return Terminal(world, tmp_path, monkeypatch, capsys)


def put(world: AccessWorld, tenant: str, name: str, value: str) -> None:
    assert world.ask("root", "PUT", f"/api/v1/secrets/{tenant}/{name}", {"value": value}).status_code == 200


def values_of(world: AccessWorld, user: str, *names: str) -> Any:
    """What a job of a user gets."""
    request = submission(secrets=dict.fromkeys(names, ""), gpus=1) | {"secrets": {}}
    answer = world.ask(user, "POST", "/api/v1/jobs", request)
    if answer.status_code != 200:
        return answer.json()["error"]
    job = answer.json()["id"]
    world.cycle()
    starts = [start for node in ("n1", "n2") for start in world.plane.sync(NodeReport(node)).starts]
    (own,) = (start.secrets for start in starts if start.key.startswith(f"{job}:"))
    world.ask("root", "POST", f"/api/v1/jobs/{job}/cancel")
    for node in ("n1", "n2"):
        world.plane.sync(NodeReport(node))
    return own


def test_job_gets_the_secrets_of_tenants_above_and_the_nearest_counts(world: AccessWorld, terminal: Terminal) -> None:
    put(world, "red", "BOTH", "red's")
    put(world, "red", "ABOVE", "red's")
    put(world, "red-a", "BOTH", "its own")
    put(world, "red-a", "BELOW", "its own")
    put(world, "blue", "THEIRS", "blue's")
    assert values_of(world, "red-a-member", "BOTH", "ABOVE") == {"BOTH": "its own", "ABOVE": "red's"}
    assert values_of(world, "red-member", "BOTH") == {"BOTH": "red's"}
    for user, name in (("red-member", "BELOW"), ("red-a-member", "THEIRS"), ("blue-member", "ABOVE")):
        assert f"needs the secret {name}" in values_of(world, user, name)
    listed = world.ask("red-a-member", "GET", "/api/v1/secrets").json()
    assert [(row["tenant"], row["name"], row["inherited"], row["user"]) for row in listed] == [
        ("red-a", "BELOW", False, "admin"),
        ("red-a", "BOTH", False, "admin"),
        ("red-a", "ABOVE", True, ""),
    ]
    assert [row["name"] for row in world.ask("blue-member", "GET", "/api/v1/secrets").json()] == ["THEIRS"]
    printed = terminal.type("red-a-member", "secrets").out.splitlines()
    assert printed[-1].split()[:3] == ["red-a", "ABOVE", "(inherited)"]


def test_admin_replaces_the_key_while_jobs_wait(world: AccessWorld, terminal: Terminal) -> None:
    put(world, "red", "KEPT", "kept")
    held = submission(secrets={"SENT": "sent", "KEPT": ""}) | {"secrets": {"SENT": "sent"}}
    job = world.ask("red-member", "POST", "/api/v1/jobs", held).json()["id"]
    refused = terminal.type("red-admin", "secrets", "rekey")
    assert "takes the role admin" in refused.err
    assert terminal.type("root", "secrets", "rekey").out.startswith("sealed with a new key: ")
    with world.accounts._store.read() as connection:
        names, key = ["SENT", "KEPT"], key_in(world.database.parent / KEY_FILE)
        for secrets in (world.plane.secrets, SecretStore(key)):
            assert secrets.values(connection, job, ("red",), names) == {"SENT": "sent", "KEPT": "kept"}
        assert SecretStore(b"k" * 32).values(connection, job, ("red",), names) is None
    entry = world.ask("root", "GET", "/api/v1/audit").json()[-1]
    assert entry["action"] == "POST /api/v1/secrets:rekey"
    assert "those of 1 jobs" in entry["detail"]
