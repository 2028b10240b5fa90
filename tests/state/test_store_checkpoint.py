import contextlib
import itertools
import json
import os
import random
import re
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import s3
from safetensors.numpy import load

from headway.errors import DamagedState, StateError
from headway.state import object_store as store_module
from headway.state.manifest import CheckpointFacts
from headway.state.object_store import open_store
from headway.state.read_checkpoint import open_checkpoint, read_box, verify_checkpoint
from headway.state.store_checkpoint import StoreCheckpoint, fetch, list_remote, prune_remote, upload
from headway.state.write_checkpoint import Piece, ShardEntry, begin_checkpoint, commit, shard_name, write_shard

pytest_plugins = ["s3"]

FACTS = CheckpointFacts(cursor=8, chain="", data_version="v", mesh={"shard": 2})
STILL = shard_name(0, frozen=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def store(bucket):
    return opened(bucket)


def opened(url, patience_s=120.0, timeout_s=60.0):
    return open_store(url, patience_s=patience_s, timeout_s=timeout_s)


@dataclass
class State:
    """Two workers' halves of what is trained, and what is not, as files and as the arrays that are in them."""

    arrays: dict[str, np.ndarray]
    shards: list[tuple[ShardEntry, memoryview]]


@pytest.fixture
def make(tmp_path):
    """Makes states: the same for the same seed; what stays as it is, is the same for all."""

    def state(seed):
        weights = np.random.default_rng(seed).integers(0, 1 << 32, (6, 50), dtype=np.uint32)
        frozen = np.random.default_rng(99).integers(0, 1 << 16, (40, 5), dtype=np.uint16)
        halves = [Piece("model/w", "float32", (6, 50), (3 * r, 0), (3, 50), weights[3 * r : 3 * r + 3]) for r in (0, 1)]
        still = Piece("model/frozen", "bfloat16", (40, 5), (0, 0), (40, 5), frozen)
        folder = tmp_path / f"made-{seed}-{threading.get_ident()}-{time.monotonic_ns()}"
        folder.mkdir()
        files = [(shard_name(0), halves[0]), (shard_name(1), halves[1]), (STILL, still)]
        shards = [write_shard(folder, name, [piece]) for name, piece in files]
        views = [memoryview((folder / shard.name).read_bytes()) for shard in shards]
        return State({"model/w": weights, "model/frozen": frozen}, list(zip(shards, views, strict=True)))

    return state


def save(store, step, state, writer="a"):
    return upload(store, step, FACTS, state.shards, 2, writer)


def keys(store):
    return [item.key for item in store.list()]


def holds(store, step, state):
    """Whether a checkpoint is whole and has these arrays."""
    verify_checkpoint(StoreCheckpoint(store, step))
    checkpoint = open_checkpoint(StoreCheckpoint(store, step))
    for name, array in state.arrays.items():
        assert np.array_equal(read_box(checkpoint, name, (0,) * array.ndim, array.shape), array)
    return True


def still_key(store):
    (key,) = [key for key in keys(store) if key.startswith("still/")]
    return key


def test_a_checkpoint_survives_upload_and_fetch(store, make, proxy, tmp_path):
    state, progress = make(1), []
    place = upload(store, 7, FACTS, state.shards, 2, "host-12", lambda done, of: progress.append((done, of)))
    assert place == f"{store.url}/step-00000007"
    sizes = [len(view) for _, view in state.shards]
    assert progress == [(sum(sizes[: n + 1]), sum(sizes)) for n in range(3)]
    own = ["step-00000007-host-12/rank-00000.safetensors", "step-00000007-host-12/rank-00001.safetensors"]
    assert keys(store) == [*own, "step-00000007.json", still_key(store)]

    proxy.calm()
    checkpoint = open_checkpoint(StoreCheckpoint(store, 7))
    assert len(proxy.seen) == 3  # the manifest, and a listing of each of two folders
    assert np.array_equal(read_box(checkpoint, "model/w", (2, 10), (2, 30)), state.arrays["model/w"][2:4, 10:40])
    verified = verify_checkpoint(StoreCheckpoint(store, 7))
    assert (verified.step, verified.tensors, verified.files, verified.bytes) == (7, 2, 3, sum(sizes))
    assert holds(store, 7, state)
    assert np.array_equal(load(store.get(own[1]))["model/w"].view(np.uint32), state.arrays["model/w"][3:])

    path = fetch(store, 7, tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints" / "step-00000007"
    assert {file.name: file.read_bytes() for file in path.glob("*.safetensors")} == {
        shard.name: bytes(view) for shard, view in state.shards
    }
    there, here = json.loads(store.get("step-00000007.json")), json.loads((path / "manifest.json").read_bytes())
    for file in there["files"].values():
        file["key"] = None
    assert {**there, "checksum": 0} == {**here, "checksum": 0}
    assert verify_checkpoint(path) == verified
    with pytest.raises(StateError, match="already exists"):
        fetch(store, 7, tmp_path / "checkpoints")


def test_the_digest_is_that_of_the_same_state_on_disk(store, make, tmp_path):
    state = make(1)
    save(store, 1, state)
    partial = begin_checkpoint(tmp_path / "checkpoints", 1)
    whole = [
        Piece("model/w", "float32", (6, 50), (0, 0), (6, 50), state.arrays["model/w"]),
        Piece("model/frozen", "bfloat16", (40, 5), (0, 0), (40, 5), state.arrays["model/frozen"]),
    ]
    path = commit(partial, FACTS, [write_shard(partial.partial, shard_name(0), whole)], workers=1)
    assert verify_checkpoint(path).digest == verify_checkpoint(StoreCheckpoint(store, 1)).digest


def test_only_complete_checkpoints_are_listed(store, make):
    assert list_remote(store) == []
    for step, seed in ((20, 1), (3, 2), (100_000_000, 3)):
        save(store, step, make(seed))
    store.put("step-00000004-b/rank-00000.safetensors", memoryview(b"begun"))
    store.put("notes.txt", memoryview(b"somebody's"))
    store.put("step-00000005.json/x", memoryview(b""))
    entries = list_remote(store)
    assert [(entry.step, entry.key) for entry in entries] == [
        (3, "step-00000003.json"),
        (20, "step-00000020.json"),
        (100_000_000, "step-100000000.json"),
    ]
    assert {entry.bytes for entry in entries} == {sum(len(view) for _, view in make(1).shards[:2])}
    with pytest.raises(StateError, match=re.escape(f"{store.url} has no checkpoint of step 4")) as missing:
        open_checkpoint(StoreCheckpoint(store, 4))
    assert missing.value.hint == f"headway checkpoint ls {store.url} lists all checkpoints"


def test_frozen_files_are_uploaded_once_and_kept_while_needed(store, make, proxy):
    states = {step: make(step) for step in (1, 2, 3)}
    save(store, 1, states[1])
    save(store, 2, states[2])
    key = still_key(store)
    assert proxy.count("PUT", key) == 1
    assert proxy.count("PUT", "rank-00000.safetensors") == 2
    assert prune_remote(store, keep_last=1) == [1]
    assert keys(store) == [*(k for k in keys(store) if "step-00000002-a/" in k), "step-00000002.json", key]
    assert holds(store, 2, states[2])
    other = make(4)
    shards = [pair for pair in other.shards if pair[0].name != STILL]
    upload(store, 4, FACTS, shards, 2, "a")  # a state without it
    assert prune_remote(store, keep_last=1) == [2]
    assert not [k for k in keys(store) if not k.startswith("step-00000004")]
    verify_checkpoint(StoreCheckpoint(store, 4))


def test_a_frozen_file_removed_during_an_upload_is_uploaded_again(store, make, proxy):
    save(store, 1, make(1))
    key = still_key(store)

    def prune_meanwhile(request):
        if request.method == "PUT" and request.path.endswith("rank-00001.safetensors"):
            proxy.harm = lambda _: None
            store.delete(["step-00000001.json", key])

    proxy.harm = prune_meanwhile
    save(store, 2, make(2))
    assert holds(store, 2, make(2))


@pytest.mark.parametrize("harm", [s3.UNAVAILABLE, s3.RESET, s3.LATE, s3.CUT, s3.DROPPED])
def test_a_bad_road_is_got_through(bucket, make, proxy, tmp_path, harm):
    store, state = opened(bucket, timeout_s=0.2 if harm == s3.LATE else 10), make(1)
    proxy.late_s = 0.5
    save(opened(bucket), 1, make(2))
    proxy.every_second(harm)
    save(store, 2, state)
    assert len(proxy.harmed) >= 3
    if harm != s3.LATE:  # the same once more, and slow
        verify_checkpoint(StoreCheckpoint(store, 2))
        assert [entry.step for entry in list_remote(store)] == [1, 2]
        assert prune_remote(store, keep_last=1) == [1]
        fetch(store, 2, tmp_path)
        assert len(keys(store)) == 4
    proxy.calm()
    assert holds(opened(bucket), 2, state)


def test_a_store_that_fails_at_any_request(bucket, make, proxy):
    """After each request in turn everything fails, that one's answer being lost: what is committed is whole."""
    hasty, store, old, new = opened(bucket, patience_s=0), opened(bucket), make(1), make(2)
    save(store, 1, old)
    committed = []
    for moment in range(8):
        step, numbers = moment + 2, itertools.count()
        proxy.harm = lambda _, n=numbers, m=moment: (None, s3.DROPPED, s3.RESET)[np.sign(next(n) - m) + 1]
        with pytest.raises(StateError, match=re.escape(store.url)) if moment < 7 else contextlib.nullcontext():
            save(hasty, step, new)
        assert len(proxy.harmed) >= (moment < 7)
        proxy.calm()
        if [entry for entry in list_remote(store) if entry.step == step]:
            verify_checkpoint(StoreCheckpoint(store, step))
            committed.append(moment)
        save(store, step, new)
        verify_checkpoint(StoreCheckpoint(store, step))
    # A look for the manifest, a listing, two files, two listings, and the commit, whose answer is lost in the end.
    assert committed == [6, 7]
    assert holds(store, 1, old)


def test_files_stay_if_the_commit_is_uncertain(bucket, make, proxy):
    hasty, store = opened(bucket, patience_s=0), opened(bucket)
    proxy.harm = lambda r: s3.DROPPED if r.conditional else None
    with pytest.raises(StateError, match=r"step-00000001\.json could not be created"):
        save(hasty, 1, make(1))
    proxy.calm()
    assert holds(store, 1, make(1))


def test_nothing_is_left_of_an_upload_that_failed(bucket, make, proxy):
    store = opened(bucket, patience_s=0.1)
    proxy.harm = lambda r: s3.UNAVAILABLE if r.path.endswith("rank-00001.safetensors") else None
    with pytest.raises(StateError, match=r"rank-00001\.safetensors could not be written: the store answered 503"):
        save(store, 1, make(1))
    assert keys(store) == []


def test_of_two_writers_one_wins(store, make):
    for step in (1, 2, 3):
        states = {writer: make(10 * step + number) for number, writer in enumerate("ab")}
        barrier, outcomes = threading.Barrier(2), {}

        def write(writer, step=step, states=states, barrier=barrier, outcomes=outcomes):
            barrier.wait()
            try:
                outcomes[writer] = save(store, step, states[writer], writer)
            except StateError as error:
                outcomes[writer] = error

        threads = [threading.Thread(target=write, args=(writer,)) for writer in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [writer for writer, outcome in outcomes.items() if outcome == f"{store.url}/step-{step:08d}"]
        (loser,) = set("ab") - {winner}
        assert f"another writer has committed step {step} in {store.url}" in outcomes[loser].message
        assert outcomes[loser].hint
        assert holds(store, step, states[winner])
        own = [key for key in keys(store) if key.startswith(f"step-{step:08d}-")]
        assert own == [f"step-{step:08d}-{winner}/rank-0000{rank}.safetensors" for rank in (0, 1)]


def test_the_same_state_twice_is_no_conflict(store, make, proxy):
    save(store, 1, make(1), "a")
    proxy.calm()
    assert save(store, 1, make(1), "b") == f"{store.url}/step-00000001"
    assert proxy.count("PUT") == 0
    with pytest.raises(StateError, match="another writer has committed step 1"):
        save(store, 1, make(2), "b")
    assert proxy.count("PUT") == 0

    def overtake(request):
        if request.conditional:
            proxy.harm = lambda _: None
            save(store, 2, make(2), "b")

    proxy.harm = overtake
    save(store, 2, make(2), "a")
    assert [key for key in keys(store) if key.startswith("step-00000002-")] == [
        f"step-00000002-b/rank-0000{rank}.safetensors" for rank in (0, 1)
    ]
    assert holds(store, 2, make(2))


def test_a_committed_step_that_is_damaged_is_not_taken_for_ours(store, make):
    save(store, 1, make(1), "a")
    store.delete(["step-00000001-a/rank-00001.safetensors"])
    with pytest.raises(DamagedState, match=r"step-00000001-a/rank-00001\.safetensors does not exist"):
        save(store, 1, make(1), "b")


def test_every_flipped_byte_is_found_and_named(store, make, tmp_path):
    save(store, 1, make(1))
    chance = random.Random(0)
    for key in keys(store):
        content = store.get(key)
        for place in {7, len(content) - 1, chance.randrange(len(content))}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << chance.randrange(8)
            store.put(key, memoryview(flipped))
            with pytest.raises(DamagedState, match=re.escape(f"{store.url}/{key}")):
                verify_checkpoint(StoreCheckpoint(store, 1))
        with pytest.raises(DamagedState, match=re.escape(f"{store.url}/{key}")):
            fetch(store, 1, tmp_path / "checkpoints")
        store.put(key, memoryview(content))
    assert not list((tmp_path / "checkpoints").iterdir())
    assert holds(store, 1, make(1))


def test_objects_that_are_missing_or_short_are_named(store, make):
    save(store, 1, make(1))
    for key in keys(store):
        content = store.get(key)
        for size in (0, len(content) - 1):
            store.put(key, memoryview(content[:size]))
            with pytest.raises(DamagedState, match=re.escape(f"{store.url}/{key}")):
                open_checkpoint(StoreCheckpoint(store, 1))
        if not key.endswith(".json"):
            store.put(key, memoryview(content))
            checkpoint = open_checkpoint(StoreCheckpoint(store, 1))
            store.delete([key])
            with pytest.raises(DamagedState, match=re.escape(f"{store.url}/{key} does not exist")):
                open_checkpoint(StoreCheckpoint(store, 1))
            with pytest.raises(DamagedState, match=re.escape(f"{store.url}/{key} does not exist")):
                [read_box(checkpoint, name, (0, 0), t.shape) for name, t in checkpoint.manifest.tensors.items()]
        store.put(key, memoryview(content))
    assert holds(store, 1, make(1))


def test_pruning_keeps_the_newest_and_multiples_in_a_store(make, tmp_path):
    store, state = opened((tmp_path / "store").as_uri()), make(1)
    chance = random.Random(1)
    for _ in range(6):
        store.delete(keys(store))
        steps = sorted(chance.sample(range(1, 13), 6))
        for step in steps:
            save(store, step, state)
        last, every, always = chance.randint(1, 4), chance.choice([0, 2, 3]), chance.choice([None, *steps])
        kept = {s for i, s in enumerate(steps) if len(steps) - i <= last or s == always or (every and s % every == 0)}
        assert prune_remote(store, last, every, always) == sorted(set(steps) - kept)
        assert [entry.step for entry in list_remote(store)] == sorted(kept)
        assert len(keys(store)) == 3 * len(kept) + 1
        assert all(holds(store, step, state) for step in kept)
        assert prune_remote(store, last, every, always) == []


def test_leftovers_of_dead_writers_are_removed_after_an_hour(make, tmp_path):
    store, root = opened((tmp_path / "store").as_uri()), tmp_path / "store"
    left = {
        "step-00000001-x/rank-00000.safetensors": 70,  # minutes ago; of a step that another has committed
        "step-00000002-x/rank-00000.safetensors": 50,
        "step-00000003-x/rank-00000.safetensors": 600,  # slow, but its last file is new
        "step-00000003-x/rank-00001.safetensors": 50,
        "step-00000004-x/rank-00000.safetensors": 61,
        f"still/{'0' * 32}.safetensors": 61,
        f"still/{'1' * 32}.safetensors": 59,
        "notes.txt": 10_000,
        "step-1-x/y/z": 10_000,
    }
    save(store, 1, make(1))
    for key in left:
        store.put(key, memoryview(b"left"))
    now = time.time()
    own_keys = [item.key for item in store.list() if item.key not in left]
    for key, minutes in left.items() | {(key, 900) for key in own_keys}:
        os.utime(root / key, (now - 60 * minutes,) * 2)
    save(store, 9, make(9))
    assert prune_remote(store, keep_last=5) == []
    gone = {key for key in left if not (root / key).exists()}
    assert gone == {key for key, minutes in left.items() if minutes in (61, 70)}
    assert holds(store, 1, make(1))
    assert holds(store, 9, make(9))


def test_pruning_beside_a_manifest_that_cannot_be_read(make, tmp_path):
    store, root = opened((tmp_path / "store").as_uri()), tmp_path / "store"
    for step in (1, 2, 3):
        save(store, step, make(step))
    for key in keys(store):
        os.utime(root / key, (time.time() - 9000,) * 2)
    content = store.get("step-00000002.json")
    store.put("step-00000002.json", memoryview(content[:-5]))
    without_still = [pair for pair in make(4).shards if pair[0].name != STILL]
    upload(store, 4, FACTS, without_still, 2, "a")
    assert prune_remote(store, keep_last=1, always=2) == [1, 3]
    store.put("step-00000002.json", memoryview(content))
    assert holds(store, 2, make(2))
    assert prune_remote(store, keep_last=1) == [2]
    assert {key.partition("/")[0] for key in keys(store)} == {"step-00000004-a", "step-00000004.json"}


def test_fetching_a_missing_checkpoint_leaves_nothing(store, make, tmp_path):
    with pytest.raises(StateError, match="has no checkpoint of step 5"):
        fetch(store, 5, tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()
    save(store, 5, make(5))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="file could not be created: File exists"):
        fetch(store, 5, tmp_path / "file")
