"""What operators watch: usage by month, metrics and alert rules, webhooks."""

import hashlib
import hmac
import ipaddress
import json
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from prometheus_client.parser import text_string_to_metric_families
from test_service_api import USER, Api

from headway.cluster.service.messages import StartReport
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.usage import Allocation, month_of, usage_of
from headway.cluster.service.webhooks import (
    MOST_BEHIND,
    TRIES,
    EventWebhook,
    WebhookFollower,
    permitted_address,
    post,
    read_webhooks,
)
from headway.errors import UsageError

api, database = test_service_api.api, test_service_api.database
ROOT = Path(__file__).parents[3]
RULES = ROOT / "docs/guides/cluster_alerts.yml"


def unix(*when: int) -> float:
    return datetime(*when, tzinfo=UTC).timestamp()  # type: ignore[misc, arg-type]


# -- usage


def test_usage_is_what_adding_up_each_second_gives() -> None:
    rng, begins, ends, now = Random(1), 100.0, 200.0, 180.0
    held = []
    for number in range(60):
        began = rng.randrange(0, 180)
        ended = rng.choice((None, began + rng.randrange(1, 80)))
        held.append(
            Allocation(str(number % 40), rng.choice("ab"), rng.choice("xy"), rng.randrange(4), 2.0, began, ended)
        )
    seconds, jobs = Counter[tuple[str, str]](), dict[tuple[str, str], set[str]]()
    for second in range(int(begins), int(ends)):
        for allocation in held:
            if allocation.began <= second < (now if allocation.ended is None else allocation.ended):
                seconds[allocation.tenant, allocation.chip] += allocation.gpus
    for allocation in held:
        jobs.setdefault((allocation.tenant, allocation.chip), set()).add(allocation.job)
    for row in usage_of(held, begins, ends, now, {"x": 3.6}):
        assert row.gpu_hours == pytest.approx(seconds[row.tenant, row.chip] / 3600)
        assert row.jobs == len(jobs[row.tenant, row.chip])
        assert row.price == (pytest.approx(3.6 * row.gpu_hours) if row.chip == "x" else None)


def test_month_ends_where_the_next_begins() -> None:
    assert month_of("2024-02") == (unix(2024, 2, 1), unix(2024, 3, 1))
    assert month_of("2026-12") == (unix(2026, 12, 1), unix(2027, 1, 1))
    for text in ("2026-13", "26-01", "2026-1", "november", "1969-12", "2026-11-01", "\u0662\u0660\u0662\u0666-11"):
        with pytest.raises(UsageError, match="month is"):
            month_of(text)


def test_usage_counts_from_placement_to_confirmed_exit(api: Api) -> None:
    api.submit(gpus=2)
    (start,) = api.sync()
    (held,) = api.get("/api/v1/usage")["usage"]
    assert (held["tenant"], held["chip"], held["jobs"]) == ("default", "fake", 1)
    with api.plane._store.read() as connection:
        ((gpus, ended),) = connection.exec_driver_sql("SELECT gpus, ended FROM allocations").all()
    assert (gpus, ended) == (2, None)
    api.sync(StartReport(start.key, "exited", RankResult(0)))
    with api.plane._store.read() as connection:
        ((began, ended),) = connection.exec_driver_sql("SELECT began, ended FROM allocations").all()
    assert ended >= began
    assert api.get("/api/v1/usage?month=2001-01")["usage"] == []
    assert api.client.get("/api/v1/usage?month=x", headers={"authorization": f"Bearer {USER}"}).status_code == 400


def test_usage_of_an_emulated_cluster_is_in_the_hours_of_its_budgets(database: Path) -> None:
    now = [unix(2026, 11, 2)]
    with test_service_api.served(database, clock=lambda: now[0], speed=60) as api:
        api.submit(gpus=2)
        (start,) = api.sync()
        api.sync(StartReport(start.key, "running"))
        now[0] += 120
        api.sync(StartReport(start.key, "exited", RankResult(0)))
        (used,) = api.get("/api/v1/usage")["usage"]
        (tenant,) = api.get("/api/v1/tenants")
    assert used["gpu_hours"] == pytest.approx(2 * 120 * 60 / 3600)
    assert tenant["spent_gpu_h"] == pytest.approx(used["gpu_hours"])


# -- metrics


def scraped(api: Api) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = api.client.get("/metrics", headers={"authorization": f"Bearer {USER}"})
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_show_nodes_gpus_and_jobs_as_they_are(api: Api) -> None:
    for gpus in (2, 1, 2):
        api.submit(gpus=gpus, site={"preemptible": "yes"})
    api.sync()
    values = scraped(api)
    assert values["headway_nodes", (("state", "healthy"),)] == 2
    assert values["headway_gpus", (("chip", "fake"),)] == 4
    assert values["headway_gpus_allocated", (("chip", "fake"),)] == 3
    assert values["headway_jobs", (("state", "starting"), ("tenant", "default"))] == 2
    assert values["headway_gpus_wanted", (("tenant", "default"),)] == 2
    assert values["headway_record_lines", ()] == len(api.plane.lines)
    api.post("/api/v1/jobs/3/cancel")
    assert ("headway_gpus_wanted", (("tenant", "default"),)) not in scraped(api)
    assert api.client.get("/metrics").status_code == 401


def test_alert_rules_name_metrics_that_exist(api: Api) -> None:
    api.submit(gpus=1)
    known = {name for name, _ in scraped(api)} | {"headway_webhook_events_total"}
    named = set(re.findall(r"\bheadway_[a-z_]+", RULES.read_text()))
    assert named
    assert named <= known


@pytest.mark.slow
def test_alert_rules_are_valid() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool")
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- webhooks


class Receiver(BaseHTTPRequestHandler):
    """Remembers posts; answers with the statuses that it was given."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posts.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        status = self.server.statuses.pop(0) if self.server.statuses else 200  # type: ignore[attr-defined]
        self.send_response(status)
        if status == 302:
            self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    server.posts, server.statuses = [], []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1",
     "0.0.0.0", "100.64.0.1", "224.0.0.1"],
)  # fmt: skip
def test_webhook_into_a_private_network_is_refused(address: str) -> None:
    with pytest.raises(OSError, match="not public"):
        permitted_address([address], ())
    assert permitted_address(["8.8.8.8"], ()) == "8.8.8.8"
    assert permitted_address(["10.1.2.3", "8.8.8.8"], ()) == "8.8.8.8"
    assert permitted_address(["10.1.2.3"], (ipaddress.ip_network("10.1.0.0/16"),)) == "10.1.2.3"


def test_webhook_connects_to_the_address_that_was_checked(receiver: HTTPServer) -> None:
    """A name that resolves to something else the second time is looked up once."""
    asked = []

    def once(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"]

    url = f"http://chat.example:{receiver.server_port}/hook?room=1"
    post(EventWebhook(url, allow=LOOPBACK, key="k" * 16), b"{}", once)
    assert asked == [("chat.example", receiver.server_port)]
    ((path, headers, body),) = receiver.posts  # type: ignore[attr-defined]
    assert path == "/hook?room=1"
    assert headers["Host"].startswith("chat.example")
    assert headers["x-headway-signature"] == "sha256=" + hmac.new(b"k" * 16, body, hashlib.sha256).hexdigest()
    with pytest.raises(OSError, match="not public"):
        post(EventWebhook(url), b"{}", once)


def test_redirect_is_a_failure_and_is_not_followed(receiver: HTTPServer) -> None:
    receiver.statuses.append(302)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="302"):
        post(EventWebhook(f"http://127.0.0.1:{receiver.server_port}/", allow=LOOPBACK), b"{}")
    assert len(receiver.posts) == 1  # type: ignore[attr-defined]


class Stopping(threading.Event):
    """Waits for nothing, and counts it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return self.is_set()


def test_webhook_tells_chosen_events_once_and_again_after_a_failure(api: Api) -> None:
    bodies, failures, counts = list[dict[str, object]](), [OSError("down")] * 2, Counter[str]()

    def send(_: EventWebhook, body: bytes) -> None:
        if failures:
            raise failures.pop()
        bodies.append(json.loads(body))

    def counted(outcome: str, count: int) -> None:
        counts[outcome] += count

    follower = WebhookFollower(EventWebhook("http://x", ("exited", "start")), lambda: api.plane.lines, counted, send)
    stopping = Stopping()
    api.submit(gpus=1)
    (start,) = api.sync()
    follower.look(stopping)
    api.sync(StartReport(start.key, "exited", RankResult(3)))
    follower.look(stopping)
    follower.look(stopping)
    told = [event["sentence"] for body in bodies for event in body["events"]]  # type: ignore[attr-defined]
    assert [text.partition(":")[0] for text in told] == ["starts on n1 GPUs 0", "over"]
    assert told[-1] == "over: failed"
    assert stopping.waits == 2
    assert counts["sent"] == 2


def test_webhook_that_is_down_loses_its_events_and_nothing_else(api: Api) -> None:
    counts, tries = Counter[str](), []

    def send(_: EventWebhook, body: bytes) -> None:
        tries.append(body)
        raise OSError

    def counted(outcome: str, count: int) -> None:
        counts[outcome] += count

    follower = WebhookFollower(EventWebhook("http://x", ("job",)), lambda: api.plane.lines, counted, send)
    api.submit()
    api.sync()
    follower.look(Stopping())
    assert len(tries) == TRIES
    assert counts["failed"] == 1
    api.plane.lines.extend([{"at": api.plane.lines.last_at, "priority": "1", "to": 1}] * (MOST_BEHIND + 7))
    follower.look(Stopping())
    assert counts["skipped"] == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no webhooks"),
        ("[[webhook]]", "no URL"),
        ('[[webhook]]\nurl = "file:///etc/passwd"', "no URL"),
        ('[[webhook]]\nurl = "https://x"\nevents = ["all"]', "unknown events"),
        ('[[webhook]]\nurl = "https://x"\nallow = ["10.0.0.1/8"]', "allow"),
        ('[[webhook]]\nurl = "https://x"\nretries = 3', "unknown key 'retries'"),
        ('[[webhook]]\nurl = "https://x"\nsecret_file = "none"', "cannot read"),
        ("[[webhook", "webhooks.toml"),
    ],
)
def test_webhooks_that_are_not_understood_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "webhooks.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_webhooks(file)
    file.write_text('[[webhook]]\nurl = "https://x/y"\nevents = ["node"]\nallow = ["10.0.0.0/8"]')
    assert read_webhooks(file) == [EventWebhook("https://x/y", ("node",), (ipaddress.ip_network("10.0.0.0/8"),))]
