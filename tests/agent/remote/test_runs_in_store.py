"""Runs with an object store, and runs that resume from it.

By default the store is a folder, or a server that never answers; tests against an S3 server are slow, and the tests of
headway.state cover the store itself. Workers read the store themselves, with the environment of their zygote: tests
with a server have a zygote of their own.
"""

import contextlib
import functools
import http.client
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Lab, Lived, assert_same
from headway.agent import AttemptOutcome, new_run, resume_run
from headway.agent.remote.store_mirror import fetch_run
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import RunError, StateError, UsageError
from headway.recipe import FaultPlan, to_toml
from headway.state import object_store as store_module
from headway.state import verify_checkpoint
from headway.state.object_store import ObjectStore, open_store
from headway.state.store_checkpoint import StoreCheckpoint, list_remote
from headway.track import RunFolder

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
def proxy_to(port: int) -> Iterator[s3.Proxy]:
    """A proxy to a server, to which the environment points."""
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
def proxy(s3_port: int) -> Iterator[s3.Proxy]:
    """The proxy to the server."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", s3_port, timeout=120)) as server:
        server.request("PUT", f"/{BUCKET}")
        assert server.getresponse().status == 200
    with proxy_to(s3_port) as proxy:
        yield proxy


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    """A store that is a folder."""
    (tmp_path / "store").mkdir()
    return (tmp_path / "store").as_uri()


@pytest.fixture(scope="module")
def own_zygote(proxy: s3.Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    """Forks workers that reach the server; it imports torch while the first tests run."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    process = ZygoteClient.start(tmp_path_factory.mktemp("zygote") / "log", environment)
    yield process
    process.close()


@pytest.fixture
def s3_lab(tmp_path: Path, own_zygote: ZygoteClient, proxy: s3.Proxy) -> Lab:
    """A lab whose workers reach the server."""
    proxy.calm()
    return Lab(tmp_path / "runs", own_zygote)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run of one worker without a store."""
    result = make_lab(tmp_path_factory.mktemp("undisturbed")).train(recipe(SETTINGS))
    assert result.outcome.state == "finished", result.outcome
    return result


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run of two workers without a store."""
    result = make_lab(tmp_path_factory.mktemp("undisturbed")).train(recipe(SETTINGS), workers=2)
    assert result.outcome.state == "finished", result.outcome
    return result


def store_of(result: Lived, url: str) -> ObjectStore:
    return open_store(f"{url}/{result.run.name}", patience_s=120)


def steps_in(store: ObjectStore) -> list[int]:
    """Steps of the intact checkpoints in a store."""
    return [verify_checkpoint(StoreCheckpoint(store, entry.step)).step for entry in list_remote(store)]


def digests(result: Lived, kind: str) -> dict[int, str]:
    return {event["step"]: event["digest"] for event in result.events(kind, "agent")}


def lose_machine(lab: Lab, recipe: Callable[..., Any], workers: int, url: str) -> Lived:
    """A run that got to step 6 and whose machine is lost."""
    result = lab.train(recipe(SETTINGS | {"checkpoint.store": rules(url)}), workers, faults=FaultPlan().kill(7))
    assert result.outcome.state == "failed"
    shutil.rmtree(result.run.checkpoints)
    return result


@pytest.mark.slow
def test_store_that_fails_half_of_its_requests_gets_everything(lab: Lab, proxy: s3.Proxy, recipe, undisturbed) -> None:
    proxy.calm()
    failures = itertools.cycle([s3.UNAVAILABLE, None, s3.RESET, None, s3.DROPPED, None, s3.CUT, None])
    proxy.harm = lambda _: next(failures)
    result = lab.train(recipe(SETTINGS | {"checkpoint.store": rules(S3_URL)}))
    assert len(proxy.harmed) >= len(proxy.seen) // 2
    proxy.calm()
    assert_same(result, undisturbed)
    assert result.events("unsaved", "agent") == []
    assert digests(result, "upload") == digests(result, "checkpoint") == digests(undisturbed, "checkpoint")
    assert steps_in(store_of(result, S3_URL)) == [4, 8]


@pytest.mark.slow
def test_store_that_is_down_costs_only_its_copies(lab, recipe, undisturbed, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "open_store", functools.partial(open_store, patience_s=0.1))
    with proxy_to(0) as proxy:
        proxy.harm = lambda _: s3.RESET
        result = lab.train(recipe(SETTINGS | {"checkpoint.store": rules(S3_URL)}))
    assert proxy.harmed == proxy.seen != []
    assert_same(result, undisturbed)
    assert result.outcome.exit_status == 0
    failures = result.events("unsaved", "agent")
    assert [(event["step"], event["tier"]) for event in failures] == [(step, "store") for step in (2, 4, 6, 8)]
    for event in failures:
        assert f"{result.run.name}/" in event["message"]
        assert "can be reached" in event["hint"]
        assert not any(secret in str(event) for secret in s3.SECRETS)
    assert [verify_checkpoint(path).step for path in sorted(result.run.checkpoints.iterdir())] == [2, 4, 6, 8]
    assert digests(result, "checkpoint") == digests(undisturbed, "checkpoint")


def test_run_that_uploads_resumes_on_a_bare_machine(
    lab: Lab, recipe, folder_url: str, undisturbed: Lived, make_lab, tmp_path: Path
) -> None:
    """By its address alone, with its history: nothing of the first machine is left."""
    lost = lose_machine(lab, recipe, 1, folder_url)
    shutil.rmtree(lab.root)
    elsewhere = make_lab(tmp_path / "elsewhere")
    run = fetch_run(f"{folder_url}/{lost.run.name}", elsewhere.root)
    assert not [path for path in (run.path, *run.path.rglob("*")) if path.stat().st_mode & 0o077], "others may not read"
    assert [event["step"] for event in Lived(run, lost.outcome).events("step")] == [1, 2, 3, 4, 5, 6]
    result = elsewhere.resume(run)
    assert_same(result, undisturbed)
    assert [event["from_step"] for event in result.events("attempt", "agent")] == [0, 6]


@pytest.mark.slow
def test_resume_takes_the_s3_address_of_any_run_that_uploads(proxy: s3.Proxy, recipe, tmp_path: Path) -> None:
    proxy.calm()
    (tmp_path / "r.toml").write_text(to_toml(recipe(SETTINGS | {"train.steps": 6, "checkpoint.store": rules(S3_URL)})))

    def headway(*words: str) -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-c", "from headway.cli.main import main; main()", *words]
        return subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)

    assert headway("train", "r.toml", "--name", "a", "--workers", "1", "--runs", "first").returncode == 0
    shutil.rmtree(tmp_path / "first")
    address = f"{S3_URL}/a"
    listed = headway("checkpoint", "ls", address)
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:3]] == ["4", "6"], listed
    assert all(" 1 " in line for line in listed.stdout.splitlines()[1:3])
    verified = headway("checkpoint", "verify", address)
    assert "step 6: ok, 1 worker, " in verified.stdout, verified
    resumed = headway("resume", address, "--set", "train.steps=8", "--runs", "second")
    assert resumed.returncode == 0, resumed.stderr
    run = Lived(RunFolder(tmp_path / "second" / "a"), AttemptOutcome("finished", "", None))
    assert [event["from_step"] for event in run.events("attempt", "agent")] == [0, 6]
    assert [event["step"] for event in run.events("step")] == [1, 2, 3, 4, 5, 6, 7, 8]
    bare = open_store(address)
    bare.delete([item.key for item in bare.list("folder")])
    refused = headway("resume", address, "--runs", "third")
    assert refused.returncode == 2
    assert f"no run metadata at {address}, but checkpoints 4-8 exist" in refused.stderr
    command = refused.stderr.partition("hint:")[2].partition(" starts a run")[0].split()
    assert command[:3] == ["headway", "train", "--from"]
    assert headway(*command[1:], "--runs", "third", "--set", "train.steps=9").returncode == 0


def test_checkpoint_damaged_in_the_store_is_skipped(lab: Lab, recipe, folder_url: str) -> None:
    killed = lose_machine(lab, recipe, 1, folder_url)
    store = store_of(killed, folder_url)
    (shard,) = [item.key for item in store.list() if "00000006" in item.key and "rank-" in item.key]
    content = store.get(shard)
    store.put(shard, memoryview(content[:-1]))
    attempt = resume_run(killed.run, [])
    assert attempt.from_step == 4
    assert any("skipped step 6" in note and shard in note for note in attempt.notes)


@pytest.mark.slow
def test_run_resumes_from_the_store_on_another_machine(s3_lab, proxy, recipe, undisturbed_pair, monkeypatch) -> None:
    """Truncated replies are requested again; if all are truncated, resuming fails."""
    killed = lose_machine(s3_lab, recipe, 2, S3_URL)
    store = store_of(killed, S3_URL)
    assert steps_in(store) == [4, 6]
    saved = digests(undisturbed_pair, "checkpoint")
    assert digests(killed, "upload") == {step: saved[step] for step in (2, 4, 6)}

    proxy.harm = lambda request: s3.CUT if request.method == "GET" else None
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "open_store", functools.partial(open_store, patience_s=0.1))
        with pytest.raises(StateError, match=f"cannot read the object store: .*{killed.run.name} could not be listed"):
            resume_run(killed.run, [])

    proxy.calm()
    numbers = itertools.count()
    proxy.harm = lambda request: s3.CUT if request.method == "GET" and next(numbers) % 16 == 0 else None
    result = s3_lab.resume(killed.run)
    cut = [request.path for request in proxy.harmed]
    proxy.calm()
    assert any(path.endswith(".safetensors") for path in cut)
    assert [event["step"] for event in result.events("resumed")] == [0, 6]
    assert_same(result, undisturbed_pair)
    assert steps_in(store) == [4, 8]
    assert digests(result, "upload")[8] == undisturbed_pair.digest


def test_run_that_dies_right_after_a_restore_from_the_store_restores_again(
    lab: Lab, recipe, undisturbed, folder_url: str
) -> None:
    killed = lose_machine(lab, recipe, 1, folder_url)
    assert digests(killed, "upload") == {step: digests(undisturbed, "checkpoint")[step] for step in (2, 4, 6)}
    result = lab.resume(killed.run, "train.restarts=1", faults=FaultPlan().kill(7, 0, attempt=2))
    assert [event["from_step"] for event in result.events("attempt", "agent")] == [0, 6, 6]
    assert_same(result, undisturbed)
    assert steps_in(store_of(killed, folder_url)) == [4, 8]


@pytest.mark.parametrize("url", ["ftp://x", "s3://me:secret@bucket/x", "s3://bucket/x?key=secret", "file://relative"])
def test_invalid_store_url_is_refused_before_anything_is_created(tmp_path, recipe, url: str) -> None:
    with pytest.raises(UsageError) as refused:
        new_run(recipe({"checkpoint.store": {"url": url}}), tmp_path / "runs", workers=1)
    assert "secret" not in refused.value.message
    assert not (tmp_path / "runs").exists()


def test_intact_copy_in_the_store_replaces_a_damaged_local_checkpoint(tmp_path, lab, recipe) -> None:
    """The newest local checkpoint has a flipped bit, which only reading finds; the store's copy is restored."""
    url = (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()
    settings = {"checkpoint.every_steps": 2, "checkpoint.store": {"url": url, "every_steps": 2}}
    trained = lab.train(recipe(settings), workers=1)
    shard = trained.run.checkpoints / "step-00000008" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    resumed = lab.resume(trained.run, "train.steps=10")
    assert resumed.outcome.state == "finished"
    assert [event["step"] for event in resumed.events("resumed")] == [0, 8]


def test_store_with_another_run_of_the_same_name_is_refused(tmp_path, lab, make_lab, recipe) -> None:
    (tmp_path / "store").mkdir()
    settings = {"train.steps": 2, "checkpoint.store": {"url": (tmp_path / "store").as_uri(), "every_steps": 1}}
    assert lab.train(recipe(settings), workers=1, name="twin").outcome.state == "finished"
    stored = sorted(path.name for path in (tmp_path / "store").rglob("*"))
    with pytest.raises(RunError, match="has checkpoints of another run named twin"):
        make_lab(tmp_path / "elsewhere").train(recipe(settings | {"seed": 5}), workers=1, name="twin")
    assert not (tmp_path / "elsewhere" / "twin").exists()
    assert sorted(path.name for path in (tmp_path / "store").rglob("*")) == stored
    # A run that could not know when it started neither uploads nor restores from there.
    stray = make_lab(tmp_path / "elsewhere").train(recipe({"train.steps": 2}), workers=1, name="twin")
    url = json.dumps(settings["checkpoint.store"]["url"])
    resumed = make_lab(tmp_path / "elsewhere").resume(stray.run, "train.steps=4", f"checkpoint.store.url={url}")
    assert resumed.outcome.state == "finished"
    assert "another run of this name" in resumed.outcome.reason
    assert [event["step"] for event in resumed.events("resumed")] == [0, 2]
    assert sorted(path.name for path in (tmp_path / "store").rglob("*")) == stored
