import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.errors import StateError
from headway.state import (
    CheckpointFacts,
    Piece,
    ShardEntry,
    abandon,
    begin_checkpoint,
    collect_shard_entries,
    commit,
    describe_shard,
    find_checkpoint,
    leave_shard_entry,
    list_checkpoints,
    open_checkpoint,
    partial_folder,
    prune,
    read_box,
    shard_name,
    verify_checkpoint,
    write_shard,
)

FACTS = CheckpointFacts(cursor=64, chain="c0ffee", data_version="v1", rng={"0": "AAEC"}, extra={"note": [1, 2.5, None]})


def piece(name="w", whole=(4, 3), start=(0, 0), shape=None, dtype="float32", seed=0):
    """A box of a tensor that is a function of its name and seed only."""
    shape = whole if shape is None else shape
    bits = np.random.default_rng([seed, len(name)]).integers(0, 2**32, whole, np.uint32)
    index = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
    return Piece(name, dtype, whole, start, shape, np.ascontiguousarray(bits[index]))


def save(folder, step, shards=None, keep=None, writer="", **options):
    """Write lists of pieces, one a rank, and commit them."""
    shards = [[piece(seed=step), piece("bias", (4,), (0,), seed=step)]] if shards is None else shards
    begun = begin_checkpoint(folder, step, writer=writer)
    written = [write_shard(begun.partial, shard_name(rank), pieces, **options) for rank, pieces in enumerate(shards)]
    path = commit(begun, FACTS, written, workers=len(shards))
    if keep is not None:
        prune(folder, *keep, always=step)
    return path


def collect_one(partial, rank):
    return [ShardEntry.model_validate_json((partial / f"{shard_name(rank)}.json").read_bytes())]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_saved_tensors_are_on_disk(tmp_path):
    path = save(tmp_path / "checkpoints", 12)
    assert path == tmp_path / "checkpoints" / "step-00000012"
    assert names(path) == ["manifest.json", "rank-00000.safetensors"]
    manifest = open_checkpoint(path).manifest
    assert (
        CheckpointFacts.model_validate({key: getattr(manifest, key) for key in CheckpointFacts.model_fields}) == FACTS
    )
    assert (manifest.step, manifest.workers, manifest.format) == (12, 1, 2)
    assert manifest.bytes == (path / "rank-00000.safetensors").stat().st_size
    assert list(manifest.tensors) == ["bias", "w"]
    assert np.array_equal(read_box(open_checkpoint(path), "w", (0, 0), (4, 3)), piece(seed=12).data)
    assert verify_checkpoint(path).digest == manifest.digest


def test_the_manifest_is_plain_json(tmp_path):
    content = json.loads((save(tmp_path, 1) / "manifest.json").read_bytes())
    assert content["format"] == 2
    assert content["tensors"]["w"]["shape"] == [4, 3]
    assert content["tensors"]["w"]["pieces"][0]["file"] == "rank-00000.safetensors"
    assert len(content["digest"]) == 32


def test_shards_and_threads_do_not_change_the_digest(tmp_path):
    halves = [
        [piece(shape=(2, 3)), piece("n", (), (), ())],
        [piece(start=(2, 0), shape=(2, 3))],
        [],
    ]
    first = open_checkpoint(save(tmp_path / "one", 1, [[piece("n", (), (), ()), piece()]])).manifest
    three = open_checkpoint(save(tmp_path / "three", 1, halves)).manifest
    assert first.digest == three.digest
    assert {name: tensor.digest for name, tensor in first.tensors.items()} == {
        name: tensor.digest for name, tensor in three.tensors.items()
    }
    threads = save(tmp_path / "threads", 1, [[piece("n", (), (), ()), piece()]], threads=3)
    assert open_checkpoint(threads).manifest.digest == first.digest


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([[piece(shape=(2, 3))], [piece(start=(3, 0), shape=(1, 3))]], "9 of 12"),
        ([[piece(shape=(3, 3))], [piece(start=(2, 0), shape=(2, 3))]], "overlap"),
        ([[piece(shape=(2, 3))], [piece(start=(2, 0), shape=(2, 3), dtype="int32")]], "disagree"),
        ([[piece(shape=(2, 3))], [piece(whole=(5, 3), start=(2, 0), shape=(3, 3))]], "disagree"),
    ],
)
def test_incomplete_pieces_are_refused(tmp_path, shards, why):
    save(tmp_path, 1)
    with pytest.raises(StateError, match=why):
        save(tmp_path, 2, shards)
    assert names(tmp_path) == ["step-00000001"]


def test_several_processes_leave_their_entries_for_the_one_that_commits(tmp_path):
    begun = begin_checkpoint(tmp_path, 3)
    halves = [piece(shape=(2, 3)), piece(start=(2, 0), shape=(2, 3))]
    for rank in (1, 0):
        leave_shard_entry(begun.partial, write_shard(begun.partial, shard_name(rank), [halves[rank]]))
    shards = collect_shard_entries(begun.partial, 2)
    assert shards == [describe_shard(shard_name(rank), [half]) for rank, half in enumerate(halves)]
    path = commit(begun, FACTS, shards, workers=2)
    assert names(path) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    verify_checkpoint(path)
    assert np.array_equal(read_box(open_checkpoint(path), "w", (0, 0), (4, 3)), piece().data)


@pytest.mark.parametrize("left", ["nothing", "half of it", "something else"])
def test_a_rank_that_has_not_written_is_named(tmp_path, left):
    begun = begin_checkpoint(tmp_path, 3)
    leave_shard_entry(begun.partial, write_shard(begun.partial, shard_name(0), [piece()]))
    entry = begun.partial / f"{shard_name(1)}.json"
    if left != "nothing":
        entry.write_text('{"name": "rank' if left == "half of it" else "[]")
    with pytest.raises(StateError, match="worker 1 has not written"):
        collect_shard_entries(begun.partial, 2)
    abandon(begun)
    assert names(tmp_path) == []


def test_a_partial_checkpoint_is_not_listed_and_the_next_save_removes_it(tmp_path):
    save(tmp_path, 1)
    begun = begin_checkpoint(tmp_path, 2)
    write_shard(begun.partial, shard_name(0), [piece()])
    bury(begun.partial)  # and then the power went
    (tmp_path / ".step-00000000.removed").mkdir()
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    assert find_checkpoint(tmp_path).name == "step-00000001"
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_abandon_leaves_nothing(tmp_path):
    begun = begin_checkpoint(tmp_path, 5)
    assert begun.partial == partial_folder(tmp_path, 5)
    write_shard(begun.partial, shard_name(0), [piece()])
    abandon(begun)
    assert names(tmp_path) == []
    begun = begin_checkpoint(tmp_path, 5)
    shutil.rmtree(begun.partial)  # somebody else was faster
    abandon(begun)
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    old = open_checkpoint(save(tmp_path, 7, [[piece(seed=1)]])).manifest.digest
    new = open_checkpoint(save(tmp_path, 7, [[piece(seed=2)]])).manifest.digest
    assert old != new
    assert names(tmp_path) == ["step-00000007"]


class PowerCut(BaseException):
    """Nothing in the program may catch it: a process that is killed does not clean up."""


def bury(folder):
    """What the kernel does for a process that died: close what it had open, which gives up its locks."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if link.readlink().is_relative_to(folder):
                os.close(int(link.name))


@pytest.mark.parametrize("name", ["fsync", "rename", "unlink", "mkdir", "rmtree", "write"])
def test_a_kill_at_any_point_of_a_save_leaves_an_intact_checkpoint(tmp_path, monkeypatch, name):
    """Stop before each of the calls that change the disk in turn; old or new must be there and whole."""
    owner = {"fsync": os, "rename": Path, "unlink": Path, "mkdir": Path, "rmtree": shutil, "write": os}[name]
    real = getattr(owner, name)
    old, new = (verify_checkpoint(save(tmp_path / str(seed), 7, [[piece(seed=seed)]])).digest for seed in (1, 2))
    for stop_at in range(10):
        folder = tmp_path / f"stop-{stop_at}"
        save(folder, 6)
        save(folder, 7, [[piece(seed=1)]])
        left = [stop_at]

        def cut(*args, left=left, **kwargs):
            if left[0] == 0:
                raise PowerCut
            left[0] -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, cut)
        try:
            begun = begin_checkpoint(folder, 7)
            leave_shard_entry(begun.partial, write_shard(begun.partial, shard_name(0), [piece(seed=2)]))
            commit(begun, FACTS, collect_shard_entries(begun.partial, 1), workers=1)
            finished = True
        except PowerCut:
            finished = False
            bury(folder)
        monkeypatch.setattr(owner, name, real)
        assert [entry.step for entry in list_checkpoints(folder)] == [6, 7]
        verify_checkpoint(find_checkpoint(folder, 6))
        seen = verify_checkpoint(find_checkpoint(folder, 7)).digest
        assert seen == new if finished else seen in (old, new)
        save(folder, 8)  # and the next save tidies up
        assert names(folder) == ["step-00000006", "step-00000007", "step-00000008"]
        if finished:
            return
    pytest.fail("never got through")


def test_finding(tmp_path):
    with pytest.raises(StateError, match="has no checkpoint") as none:
        find_checkpoint(tmp_path / "nowhere")
    assert none.value.hint
    for step in (100, 20, 123456789):
        save(tmp_path, step)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [20, 100, 123456789]
    assert find_checkpoint(tmp_path).name == "step-123456789"
    assert find_checkpoint(tmp_path, 20).name == "step-00000020"
    with pytest.raises(StateError, match="no checkpoint of step 21") as missing:
        find_checkpoint(tmp_path, 21)
    assert missing.value.hint == "there are 20, 100, 123456789"


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path):
    for step in range(10, 100, 10):
        save(tmp_path, step)
    assert prune(tmp_path, keep_last=2, keep_every_steps=30) == [10, 20, 40, 50, 70]
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [30, 60, 80, 90]
    assert prune(tmp_path, keep_last=1) == [30, 60, 80]
    for step in (100, 110):
        save(tmp_path, step, keep=(1, 0))
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [110]
    save(tmp_path, 50, keep=(1, 0))  # behind what is there: the one just made stays
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [50, 110]


def test_insufficient_space_is_reported_before_anything_is_written(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(StateError, match=r"step 2 needs 1000000\.0 TB, .* free") as error:
        begin_checkpoint(tmp_path, 2, needs_bytes=10**18)
    assert "keep_last" in error.value.hint
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failing_disk_is_a_clear_error(tmp_path, monkeypatch, code, call):
    save(tmp_path, 1)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    begun = begin_checkpoint(tmp_path, 2)
    partial = begun.partial
    leave_shard_entry(partial, write_shard(partial, shard_name(1), [piece(start=(2, 0), shape=(2, 3))]))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StateError, match=os.strerror(code)) as error:
            write_shard(partial, shard_name(0), [piece(shape=(2, 3))])
    assert "rank-00000.safetensors could not be written" in error.value.message
    assert error.value.hint
    other_files = ["rank-00001.safetensors", "rank-00001.safetensors.json"]
    assert names(partial) == other_files
    shard = write_shard(partial, shard_name(0), [piece(shape=(2, 3))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StateError, match=r"rank-00000\.safetensors\.json could not be written"):
            leave_shard_entry(partial, shard)
        assert names(partial) == ["rank-00000.safetensors", *other_files]
        with pytest.raises(StateError, match="step 2 could not be committed"):
            commit(begun, FACTS, [shard, *collect_one(partial, 1)], workers=2)
    assert names(tmp_path) == ["step-00000001"]
    verify_checkpoint(find_checkpoint(tmp_path))


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StateError, match="step 1 could not be started"):
        begin_checkpoint(tmp_path / "checkpoints", 1)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a tmpfs needs root")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_really_full(small_disk):
    def big(start):
        return Piece("w", "uint8", (600_000,), (start,), (300_000,), np.full(300_000, 7, np.uint8))

    save(small_disk / "checkpoints", 1, [[big(0)], [big(300_000)]])
    digest = verify_checkpoint(find_checkpoint(small_disk / "checkpoints")).digest
    with pytest.raises(StateError, match="step 2 needs 600"):
        begin_checkpoint(small_disk / "checkpoints", 2, needs_bytes=600_000)
    begun = begin_checkpoint(small_disk / "checkpoints", 2)
    write_shard(begun.partial, shard_name(0), [big(0)])
    with pytest.raises(StateError, match="No space left on device"):
        write_shard(begun.partial, shard_name(1), [big(300_000)])
    abandon(begun)
    assert names(small_disk / "checkpoints") == ["step-00000001"]
    assert verify_checkpoint(find_checkpoint(small_disk / "checkpoints")).digest == digest
    small = [[Piece("w", "uint8", (9,), (0,), (9,), np.arange(9, dtype=np.uint8))]]
    assert save(small_disk / "checkpoints", 3, small).exists()


def saved_with_still(folder, step, still, before=None):
    """A checkpoint of one rank that trains one tensor and leaves another as it is; its file of the latter."""
    begun = begin_checkpoint(folder, step)
    shards = [
        write_shard(begun.partial, shard_name(0), [piece(seed=step)]),
        write_shard(begun.partial, shard_name(0, frozen=True), [still], before=before and open_checkpoint(before)),
    ]
    return commit(begun, FACTS, shards, workers=1)


FROZEN = piece("frozen", (3, 5), (0, 0), seed=9)
STILL = "rank-00000-still.safetensors"


def test_a_file_that_has_not_changed_is_written_once(tmp_path):
    first = saved_with_still(tmp_path, 1, FROZEN)
    assert names(first) == ["manifest.json", STILL, "rank-00000.safetensors"]
    second = saved_with_still(tmp_path, 2, FROZEN, before=first)
    third = saved_with_still(tmp_path, 3, FROZEN, before=second)
    assert len({(path / STILL).stat().st_ino for path in (first, second, third)}) == 1
    assert len({(path / "rank-00000.safetensors").stat().st_ino for path in (first, second, third)}) == 3
    assert prune(tmp_path, keep_last=1) == [1, 2]
    assert verify_checkpoint(third).files == 2
    assert np.array_equal(read_box(open_checkpoint(third), "frozen", (0, 0), (3, 5)), FROZEN.data)
    assert (third / STILL).stat().st_nlink == 1


def test_a_step_that_is_saved_again_may_refer_to_itself(tmp_path):
    first = saved_with_still(tmp_path, 1, FROZEN)
    inode = (first / STILL).stat().st_ino
    again = saved_with_still(tmp_path, 1, FROZEN, before=first)
    assert (again / STILL).stat().st_ino == inode
    verify_checkpoint(again)


@pytest.mark.parametrize(
    "now",
    [
        piece("frozen", (3, 5), (0, 0), seed=8),
        piece("frozen", (3, 5), (0, 0), dtype="int32", seed=9),
        piece("chosen", (3, 5), (0, 0), seed=9),  # the same bytes under another name
        replace(FROZEN, shape=(5, 3), local_shape=(5, 3), data=FROZEN.data.reshape(5, 3)),
    ],
    ids=["bits", "dtype", "name", "shape"],
)
def test_a_file_that_has_changed_is_written(tmp_path, now):
    first = saved_with_still(tmp_path, 1, FROZEN)
    second = saved_with_still(tmp_path, 2, now, before=first)
    assert (first / STILL).stat().st_ino != (second / STILL).stat().st_ino
    for path, frozen in ((first, FROZEN), (second, now)):
        verify_checkpoint(path)
        assert np.array_equal(read_box(open_checkpoint(path), frozen.name, (0, 0), frozen.shape), frozen.data)


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOENT])
def test_a_file_that_cannot_be_linked_is_written(tmp_path, monkeypatch, refusal):
    def refuse(*_):
        raise OSError(refusal, os.strerror(refusal))

    first = saved_with_still(tmp_path, 1, FROZEN)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        second = saved_with_still(tmp_path, 2, FROZEN, before=first)
    assert (second / STILL).stat().st_nlink == 1
    verify_checkpoint(second)


def test_leftovers_of_dead_writers_are_removed_and_live_writers_left_alone(tmp_path):
    begun = {writer: begin_checkpoint(tmp_path, 7, writer=writer) for writer in ("a", "b")}
    assert begun["a"].partial != begun["b"].partial
    dead = begin_checkpoint(tmp_path, 7, writer="dead")
    write_shard(dead.partial, shard_name(0), [piece()])
    bury(dead.partial)
    shards = {w: write_shard(begun[w].partial, shard_name(0), [piece(seed=i)]) for i, w in enumerate(begun)}
    abandon(begin_checkpoint(tmp_path, 9))
    assert names(tmp_path) == [".step-00000007.a.partial", ".step-00000007.b.partial"]
    for seed, writer in enumerate(begun):
        path = commit(begun[writer], FACTS, [shards[writer]], workers=1)
        assert np.array_equal(read_box(open_checkpoint(path), "w", (0, 0), (4, 3)), piece(seed=seed).data)
    assert names(tmp_path) == ["step-00000007"]
    verify_checkpoint(path)


@pytest.mark.parametrize("at", ["begin", "commit"])
def test_a_writer_starting_during_a_commit_removes_nothing(tmp_path, monkeypatch, at):
    """One is held between making its folder and locking it, or between the two renames of a commit."""
    save(tmp_path, 7, [[piece(seed=1)]])
    held, go_on = threading.Event(), threading.Event()
    real_flock, real_rename = fcntl.flock, Path.rename

    def hold():
        if threading.current_thread().name.startswith("first") and not held.is_set():
            held.set()
            go_on.wait(0.2)  # the other may rightly wait for this one

    def flock(descriptor, how):
        if at == "begin" and Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".partial":
            hold()
        real_flock(descriptor, how)

    def rename(path, target):
        real_rename(path, target)
        if at == "commit":
            hold()

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(Path, "rename", rename)
    with ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        first = pool.submit(save, tmp_path, 7, [[piece(seed=2)]], writer="first")
        assert held.wait(10)
        save(tmp_path, 8, writer="second")
        go_on.set()
        first.result()
    assert names(tmp_path) == ["step-00000007", "step-00000008"]
    verify_checkpoint(tmp_path / "step-00000008")
    assert np.array_equal(
        read_box(open_checkpoint(tmp_path / "step-00000007"), "w", (0, 0), (4, 3)), piece(seed=2).data
    )


def compete(folder, seed, steps, barrier, log):
    for step in steps:
        barrier.wait(30)
        try:
            save(folder, step, [[piece(seed=seed)]], keep=(2, 0), writer=f"writer-{seed}")
        except StateError as error:
            log.put((step, seed, error.message))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_two_processes_that_save_the_same_steps(tmp_path):
    """Ten rounds of one step and ten of rising ones; any exception but a StateError ends a process."""
    steps = [7] * 10 + list(range(8, 18))
    context = multiprocessing.get_context("fork")
    barrier, log = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=compete, args=(tmp_path, seed, steps, barrier, log)) for seed in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    lost = []
    while not log.empty():
        lost.append(log.get())
    assert lost == []
    assert names(tmp_path) == ["step-00000016", "step-00000017"]
    for name in names(tmp_path):
        verify_checkpoint(tmp_path / name)
        bits = read_box(open_checkpoint(tmp_path / name), "w", (0, 0), (4, 3))
        assert any(np.array_equal(bits, piece(seed=seed).data) for seed in (1, 2))
