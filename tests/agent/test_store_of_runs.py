"""Runs with an object store: a real S3 server behind a road that can be made bad, and runs that go on from there.

Workers ask the store themselves, with the environment that their zygote was started with: so these have one of their
own, started when the environment leads to the server.
"""

import contextlib
import functools
import http.client
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Lab, Lived, assert_same, left_alone
from headway.agent import new_run, resume_run
from headway.agent.zygote import Zygote
from headway.errors import RunError, StateError, UsageError
from headway.recipe import FaultPlan
from headway.state import store as store_module
from headway.state import verify
from headway.state.remote import Remote, list_remote
from headway.state.store import Store, open_store

sys.path.append(str(Path(__file__).parents[1] / "state"))
import s3

pytest_plugins = ["s3"]

STEPS = 8
SETTINGS = {"train.steps": STEPS, "checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
BUCKET = "runs-of-tests"
RULES = {"url": f"s3://{BUCKET}/all", "every_steps": 2, "keep_last": 1, "keep_every_steps": 4}


@pytest.fixture(scope="module")
def road(s3_port: int) -> Iterator[s3.Proxy]:
    """The way to the server, which the environment of this module's tests leads over."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", s3_port, timeout=20)) as server:
        server.request("PUT", f"/{BUCKET}")
        assert server.getresponse().status == 200
    with s3.running_proxy(s3_port) as proxy, pytest.MonkeyPatch.context() as patch:
        for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
            patch.delenv(variable)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", s3.SECRETS[0])
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRETS[1])
        patch.setattr(store_module, "_FIRST_PAUSE_S", 0.01)
        yield proxy


@pytest.fixture(scope="module")
def own_zygote(road: s3.Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks workers that find the way; it imports torch while the first tests run."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    process = Zygote.start(tmp_path_factory.mktemp("zygote") / "log", environment)
    yield process
    process.close()


@pytest.fixture
def near(lab: Lab, own_zygote: Zygote, road: s3.Proxy) -> Lab:
    """A place to run recipes whose agent reaches the store; its workers need not."""
    road.calm()
    return lab


@pytest.fixture
def far(tmp_path: Path, own_zygote: Zygote, road: s3.Proxy) -> Lab:
    """A place to run recipes whose workers reach the store."""
    road.calm()
    return Lab(tmp_path / "runs", own_zygote)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> dict[int, Lived]:
    """Runs of one and of two workers without a store."""
    return left_alone(tmp_path_factory.mktemp("unharmed"), make_lab, recipe(SETTINGS))


def store_of(lived: Lived) -> Store:
    return open_store(f"{RULES['url']}/{lived.run.name}", patience_s=20)


def steps_in(store: Store) -> list[int]:
    """The steps that a store has checkpoints of, which are whole."""
    return [verify(Remote(store, entry.step)).step for entry in list_remote(store)]


def digests(lived: Lived, kind: str) -> dict[int, str]:
    return {event["step"]: event["digest"] for event in lived.events(kind, "agent")}


def lost(lab: Lab, recipe: Callable[..., Any], workers: int) -> Lived:
    """A run that got to step 6, and whose machine is no more."""
    lived = lab.train(recipe(SETTINGS | {"checkpoint.store": RULES}), workers, faults=FaultPlan().kill(7))
    assert lived.outcome.state == "failed"
    shutil.rmtree(lived.run.checkpoints)
    return lived


def test_a_store_that_fails_half_of_its_requests_gets_everything(near: Lab, road: s3.Proxy, recipe, unharmed) -> None:
    harms = itertools.cycle([s3.UNAVAILABLE, None, s3.RESET, None, s3.DROPPED, None, s3.CUT, None])
    road.harm = lambda _: next(harms)
    lived = near.train(recipe(SETTINGS | {"checkpoint.store": RULES}))
    assert len(road.harmed) >= len(road.seen) // 2
    road.calm()
    assert_same(lived, unharmed[1])
    assert lived.events("unsaved", "agent") == []
    assert digests(lived, "upload") == digests(lived, "checkpoint") == digests(unharmed[1], "checkpoint")
    assert steps_in(store_of(lived)) == [4, 8]


def test_a_store_that_is_down_costs_nothing_but_its_copies(near, road, recipe, unharmed, monkeypatch) -> None:
    road.harm = lambda _: s3.RESET
    monkeypatch.setattr(store_module, "open_store", functools.partial(open_store, patience_s=0.1))
    lived = near.train(recipe(SETTINGS | {"checkpoint.store": RULES}))
    road.calm()
    assert_same(lived, unharmed[1])
    assert lived.outcome.exit_status == 0
    told = lived.events("unsaved", "agent")
    assert [(event["step"], event["tier"]) for event in told] == [(step, "store") for step in (2, 4, 6, 8)]
    for event in told:
        assert f"{lived.run.name}/" in event["message"]
        assert "can be reached" in event["hint"]
        assert not any(secret in str(event) for secret in s3.SECRETS)
    assert [verify(path).step for path in sorted(lived.run.checkpoints.iterdir())] == [2, 4, 6, 8]
    assert digests(lived, "checkpoint") == digests(unharmed[1], "checkpoint")
    assert steps_in(store_of(lived)) == []


def test_a_checkpoint_that_is_damaged_in_the_store_is_passed_over(near: Lab, recipe) -> None:
    killed = lost(near, recipe, workers=1)
    store = store_of(killed)
    (shard,) = [item.key for item in store.list() if "00000006" in item.key and "rank-" in item.key]
    content = store.get(shard)
    store.put(shard, memoryview(content[:-1]))
    attempt = resume_run(killed.run, [])
    assert attempt.from_step == 4
    assert any("step 6" in note and "passed over" in note and shard in note for note in attempt.notes)


def test_a_run_goes_on_from_the_store_on_another_machine(far, road, recipe, unharmed, monkeypatch) -> None:
    """Answers that are cut short are asked for again; where all of them are, nothing is made up."""
    killed = lost(far, recipe, workers=2)
    store = store_of(killed)
    assert steps_in(store) == [4, 6]
    saved = digests(unharmed[2], "checkpoint")
    assert digests(killed, "upload") == {step: saved[step] for step in (2, 4, 6)}

    road.harm = lambda request: s3.CUT if request.method == "GET" else None
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "open_store", functools.partial(open_store, patience_s=0.1))
        with pytest.raises(StateError, match=f"cannot be asked: .*{killed.run.name} could not be listed"):
            resume_run(killed.run, [])

    road.calm()
    numbers = itertools.count()
    road.harm = lambda request: s3.CUT if request.method == "GET" and next(numbers) % 16 == 0 else None
    lived = far.resume(killed.run)
    cut = [request.path for request in road.harmed]
    road.calm()
    assert any(path.endswith(".safetensors") for path in cut)
    assert [event["step"] for event in lived.events("resumed")] == [0, 6]
    assert_same(lived, unharmed[2])
    assert steps_in(store) == [4, 8]
    assert digests(lived, "upload")[8] == unharmed[2].digest


def test_a_run_from_the_store_that_dies_at_once_goes_back_there(far: Lab, recipe, unharmed) -> None:
    killed = lost(far, recipe, workers=1)
    lived = far.resume(killed.run, "train.restarts=1", faults=FaultPlan().kill(7, 0, attempt=2))
    assert [event["from_step"] for event in lived.events("attempt", "agent")] == [0, 6, 6]
    assert_same(lived, unharmed[1])


@pytest.mark.parametrize("url", ["ftp://x", "s3://me:secret@bucket/x", "s3://bucket/x?key=secret", "file://relative"])
def test_a_store_that_can_never_work_is_refused_before_anything_is_made(tmp_path, recipe, url: str) -> None:
    with pytest.raises(UsageError) as refused:
        new_run(recipe({"checkpoint.store": {"url": url}}), tmp_path / "runs", workers=1)
    assert "secret" not in refused.value.message
    assert not (tmp_path / "runs").exists()


def test_a_store_has_the_whole_copy_of_a_step_that_is_damaged_here(tmp_path, lab, recipe) -> None:
    """Two steps on: the newest here is damaged inside, which only reading finds; the store's copy of it is taken."""
    url = (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()
    settings = {"checkpoint.every_steps": 2, "checkpoint.store": {"url": url, "every_steps": 2}}
    whole = lab.train(recipe(settings), workers=1)
    shard = whole.run.checkpoints / "step-00000008" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    resumed = lab.resume(whole.run, "train.steps=10")
    assert resumed.outcome.state == "finished"
    assert [event["step"] for event in resumed.events("resumed")] == [0, 8]


def test_another_run_of_the_same_name_and_place_is_refused(tmp_path, lab, make_lab, recipe) -> None:
    (tmp_path / "store").mkdir()
    settings = {"train.steps": 2, "checkpoint.store": {"url": (tmp_path / "store").as_uri(), "every_steps": 1}}
    assert lab.train(recipe(settings), workers=1, name="twin").outcome.state == "finished"
    there = sorted(path.name for path in (tmp_path / "store").rglob("*"))
    with pytest.raises(RunError, match="has checkpoints of another run of the name twin"):
        make_lab(tmp_path / "elsewhere").train(recipe(settings | {"seed": 5}), workers=1, name="twin")
    assert not (tmp_path / "elsewhere" / "twin").exists()
    assert sorted(path.name for path in (tmp_path / "store").rglob("*")) == there
    # One that could not know when it began does not upload, nor take what is there for its own.
    stray = make_lab(tmp_path / "elsewhere").train(recipe({"train.steps": 2}), workers=1, name="twin")
    url = json.dumps(settings["checkpoint.store"]["url"])
    resumed = make_lab(tmp_path / "elsewhere").resume(stray.run, "train.steps=4", f"checkpoint.store.url={url}")
    assert resumed.outcome.state == "finished"
    assert "another run of this name" in resumed.outcome.reason
    assert [event["step"] for event in resumed.events("resumed")] == [0, 2]
    assert sorted(path.name for path in (tmp_path / "store").rglob("*")) == there
