"""Runs with an object store, and runs that go on from there.

By default the store is a folder, or a road that leads nowhere; what an S3 server adds is slow, as the tests of
headway.state hold the store itself against one. Workers ask the store themselves, with the environment that their
zygote was started with: where that is a server, they have one of their own.
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

from conftest import Lab, Lived, assert_same
from headway.agent import new_run, resume_run
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import RunError, StateError, UsageError
from headway.recipe import FaultPlan
from headway.state import object_store as store_module
from headway.state import verify_checkpoint
from headway.state.object_store import ObjectStore, open_store
from headway.state.store_checkpoint import StoreCheckpoint, list_remote

sys.path.append(str(Path(__file__).parents[2] / "state"))
import s3

pytest_plugins = ["s3"]

STEPS = 8
SETTINGS = {"train.steps": STEPS, "checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
BUCKET = "runs-of-tests"
S3_URL = f"s3://{BUCKET}/all"


def rules(url: str) -> dict[str, Any]:
    return {"url": url, "every_steps": 2, "keep_last": 1, "keep_every_steps": 4}


@contextlib.contextmanager
def road_to(port: int) -> Iterator[s3.Proxy]:
    """A way to a server, which the environment leads over."""
    with s3.running_proxy(port) as proxy, pytest.MonkeyPatch.context() as patch:
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
def road(s3_port: int) -> Iterator[s3.Proxy]:
    """The way to the server."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", s3_port, timeout=120)) as server:
        server.request("PUT", f"/{BUCKET}")
        assert server.getresponse().status == 200
    with road_to(s3_port) as proxy:
        yield proxy


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    """A store that is a folder."""
    (tmp_path / "store").mkdir()
    return (tmp_path / "store").as_uri()


@pytest.fixture(scope="module")
def own_zygote(road: s3.Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    """Forks workers that find the way; it imports torch while the first tests run."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    process = ZygoteClient.start(tmp_path_factory.mktemp("zygote") / "log", environment)
    yield process
    process.close()


@pytest.fixture
def far(tmp_path: Path, own_zygote: ZygoteClient, road: s3.Proxy) -> Lab:
    """A place to run recipes whose workers reach the server."""
    road.calm()
    return Lab(tmp_path / "runs", own_zygote)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run of one worker without a store."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS))
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.fixture(scope="module")
def unharmed_pair(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run of two workers without a store."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


def store_of(lived: Lived, url: str) -> ObjectStore:
    return open_store(f"{url}/{lived.run.name}", patience_s=120)


def steps_in(store: ObjectStore) -> list[int]:
    """The steps that a store has checkpoints of, which are whole."""
    return [verify_checkpoint(StoreCheckpoint(store, entry.step)).step for entry in list_remote(store)]


def digests(lived: Lived, kind: str) -> dict[int, str]:
    return {event["step"]: event["digest"] for event in lived.events(kind, "agent")}


def lost(lab: Lab, recipe: Callable[..., Any], workers: int, url: str) -> Lived:
    """A run that got to step 6, and whose machine is no more."""
    lived = lab.train(recipe(SETTINGS | {"checkpoint.store": rules(url)}), workers, faults=FaultPlan().kill(7))
    assert lived.outcome.state == "failed"
    shutil.rmtree(lived.run.checkpoints)
    return lived


@pytest.mark.slow
def test_a_store_that_fails_half_of_its_requests_gets_everything(lab: Lab, road: s3.Proxy, recipe, unharmed) -> None:
    road.calm()
    harms = itertools.cycle([s3.UNAVAILABLE, None, s3.RESET, None, s3.DROPPED, None, s3.CUT, None])
    road.harm = lambda _: next(harms)
    lived = lab.train(recipe(SETTINGS | {"checkpoint.store": rules(S3_URL)}))
    assert len(road.harmed) >= len(road.seen) // 2
    road.calm()
    assert_same(lived, unharmed)
    assert lived.events("unsaved", "agent") == []
    assert digests(lived, "upload") == digests(lived, "checkpoint") == digests(unharmed, "checkpoint")
    assert steps_in(store_of(lived, S3_URL)) == [4, 8]


def test_a_store_that_is_down_costs_nothing_but_its_copies(lab, recipe, unharmed, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "open_store", functools.partial(open_store, patience_s=0.1))
    with road_to(0) as road:
        road.harm = lambda _: s3.RESET
        lived = lab.train(recipe(SETTINGS | {"checkpoint.store": rules(S3_URL)}))
    assert road.harmed == road.seen != []
    assert_same(lived, unharmed)
    assert lived.outcome.exit_status == 0
    told = lived.events("unsaved", "agent")
    assert [(event["step"], event["tier"]) for event in told] == [(step, "store") for step in (2, 4, 6, 8)]
    for event in told:
        assert f"{lived.run.name}/" in event["message"]
        assert "can be reached" in event["hint"]
        assert not any(secret in str(event) for secret in s3.SECRETS)
    assert [verify_checkpoint(path).step for path in sorted(lived.run.checkpoints.iterdir())] == [2, 4, 6, 8]
    assert digests(lived, "checkpoint") == digests(unharmed, "checkpoint")


def test_a_checkpoint_that_is_damaged_in_the_store_is_passed_over(lab: Lab, recipe, folder_url: str) -> None:
    killed = lost(lab, recipe, 1, folder_url)
    store = store_of(killed, folder_url)
    (shard,) = [item.key for item in store.list() if "00000006" in item.key and "rank-" in item.key]
    content = store.get(shard)
    store.put(shard, memoryview(content[:-1]))
    attempt = resume_run(killed.run, [])
    assert attempt.from_step == 4
    assert any("skipped step 6" in note and shard in note for note in attempt.notes)


@pytest.mark.slow
def test_a_run_goes_on_from_the_store_on_another_machine(far, road, recipe, unharmed_pair, monkeypatch) -> None:
    """Answers that are cut short are asked for again; where all of them are, nothing is made up."""
    killed = lost(far, recipe, 2, S3_URL)
    store = store_of(killed, S3_URL)
    assert steps_in(store) == [4, 6]
    saved = digests(unharmed_pair, "checkpoint")
    assert digests(killed, "upload") == {step: saved[step] for step in (2, 4, 6)}

    road.harm = lambda request: s3.CUT if request.method == "GET" else None
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "open_store", functools.partial(open_store, patience_s=0.1))
        with pytest.raises(StateError, match=f"cannot read the object store: .*{killed.run.name} could not be listed"):
            resume_run(killed.run, [])

    road.calm()
    numbers = itertools.count()
    road.harm = lambda request: s3.CUT if request.method == "GET" and next(numbers) % 16 == 0 else None
    lived = far.resume(killed.run)
    cut = [request.path for request in road.harmed]
    road.calm()
    assert any(path.endswith(".safetensors") for path in cut)
    assert [event["step"] for event in lived.events("resumed")] == [0, 6]
    assert_same(lived, unharmed_pair)
    assert steps_in(store) == [4, 8]
    assert digests(lived, "upload")[8] == unharmed_pair.digest


def test_a_run_from_the_store_that_dies_at_once_goes_back_there(lab: Lab, recipe, unharmed, folder_url: str) -> None:
    killed = lost(lab, recipe, 1, folder_url)
    assert digests(killed, "upload") == {step: digests(unharmed, "checkpoint")[step] for step in (2, 4, 6)}
    lived = lab.resume(killed.run, "train.restarts=1", faults=FaultPlan().kill(7, 0, attempt=2))
    assert [event["from_step"] for event in lived.events("attempt", "agent")] == [0, 6, 6]
    assert_same(lived, unharmed)
    assert steps_in(store_of(killed, folder_url)) == [4, 8]


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
