import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headway.errors import StateError
from headway.state import (
    Facts,
    Piece,
    abandon,
    begin,
    commit,
    find_checkpoint,
    list_checkpoints,
    open_checkpoint,
    partial_folder,
    prune,
    read_box,
    verify,
    write_shard,
)

FACTS = Facts(cursor=64, chain="c0ffee", data_version="v1", rng={"0": "AAEC"}, extra={"note": [1, 2.5, None]})


def piece(name="w", whole=(4, 3), start=(0, 0), shape=None, dtype="float32", seed=0):
    """A box of a tensor that is a function of its name and seed only."""
    shape = whole if shape is None else shape
    bits = np.random.default_rng([seed, len(name)]).integers(0, 2**32, whole, np.uint32)
    index = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
    return Piece(name, dtype, whole, start, shape, np.ascontiguousarray(bits[index]))


def save(folder, step, shards=None, **keep):
    shards = [[piece(seed=step), piece("bias", (4,), (0,), seed=step)]] if shards is None else shards
    partial = begin(folder, step)
    for rank, pieces in enumerate(shards):
        write_shard(partial, rank, pieces)
    return commit(folder, step, FACTS, workers=len(shards), **keep)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_there(tmp_path):
    path = save(tmp_path / "checkpoints", 12)
    assert path == tmp_path / "checkpoints" / "step-00000012"
    assert names(path) == ["manifest.json", "rank-00000.safetensors"]
    manifest = open_checkpoint(path).manifest
    assert Facts.model_validate({key: getattr(manifest, key) for key in Facts.model_fields}) == FACTS
    assert (manifest.step, manifest.workers, manifest.format) == (12, 1, 1)
    assert manifest.bytes == (path / "rank-00000.safetensors").stat().st_size
    assert list(manifest.tensors) == ["bias", "w"]
    assert np.array_equal(read_box(open_checkpoint(path), "w", (0, 0), (4, 3)), piece(seed=12).data)
    assert verify(path).digest == manifest.digest


def test_the_manifest_is_plain_json(tmp_path):
    content = json.loads((save(tmp_path, 1) / "manifest.json").read_bytes())
    assert content["format"] == 1
    assert content["tensors"]["w"]["shape"] == [4, 3]
    assert content["tensors"]["w"]["pieces"][0]["file"] == "rank-00000.safetensors"
    assert len(content["digest"]) == 32


def test_shards_and_threads_do_not_change_the_digest(tmp_path):
    halves = [
        [piece(shape=(2, 3)), piece("n", (), (), ())],
        [piece(start=(2, 0), shape=(2, 3))],
        [],
    ]
    one = open_checkpoint(save(tmp_path / "one", 1, [[piece("n", (), (), ()), piece()]])).manifest
    three = open_checkpoint(save(tmp_path / "three", 1, halves)).manifest
    assert one.digest == three.digest
    assert {name: tensor.digest for name, tensor in one.tensors.items()} == {
        name: tensor.digest for name, tensor in three.tensors.items()
    }
    partial = begin(tmp_path / "threads", 1)
    write_shard(partial, 0, [piece("n", (), (), ()), piece()], threads=3)
    assert open_checkpoint(commit(tmp_path / "threads", 1, FACTS, workers=1)).manifest.digest == one.digest


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([[piece(shape=(2, 3))], [piece(start=(3, 0), shape=(1, 3))]], "9 of its 12"),
        ([[piece(shape=(3, 3))], [piece(start=(2, 0), shape=(2, 3))]], "overlap"),
        ([[piece(shape=(2, 3))], [piece(start=(2, 0), shape=(2, 3), dtype="int32")]], "disagree"),
        ([[piece(shape=(2, 3))], [piece(whole=(5, 3), start=(2, 0), shape=(3, 3))]], "disagree"),
    ],
)
def test_pieces_that_do_not_make_a_whole_are_refused(tmp_path, shards, why):
    save(tmp_path, 1)
    with pytest.raises(StateError, match=why):
        save(tmp_path, 2, shards)
    assert names(tmp_path) == ["step-00000001"]


def test_a_rank_that_has_not_written_is_named(tmp_path):
    write_shard(begin(tmp_path, 3), 0, [piece()])
    with pytest.raises(StateError, match="worker 1 has not written"):
        commit(tmp_path, 3, FACTS, workers=2)
    assert names(tmp_path) == []


def test_half_a_checkpoint_is_never_one_and_the_next_save_clears_it(tmp_path):
    save(tmp_path, 1)
    write_shard(begin(tmp_path, 2), 0, [piece()])  # and then the power went
    (tmp_path / ".step-00000000.removed").mkdir()
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    assert find_checkpoint(tmp_path).name == "step-00000001"
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_abandon_leaves_nothing(tmp_path):
    partial = begin(tmp_path, 5)
    assert partial == partial_folder(tmp_path, 5)
    write_shard(partial, 0, [piece()])
    abandon(partial)
    abandon(partial)
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    old = open_checkpoint(save(tmp_path, 7, [[piece(seed=1)]])).manifest.digest
    new = open_checkpoint(save(tmp_path, 7, [[piece(seed=2)]])).manifest.digest
    assert old != new
    assert names(tmp_path) == ["step-00000007"]


class PowerCut(BaseException):
    """Nothing in the program may catch it: a process that is killed does not clean up."""


@pytest.mark.parametrize("name", ["fsync", "rename", "unlink", "rmtree"])
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch, name):
    """Stop before each of the calls that change the disk in turn; old or new must be there and whole."""
    owner = {"fsync": os, "rename": Path, "unlink": Path, "rmtree": shutil}[name]
    real = getattr(owner, name)
    old, new = (verify(save(tmp_path / str(seed), 7, [[piece(seed=seed)]])).digest for seed in (1, 2))
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
            save(folder, 7, [[piece(seed=2)]])
            finished = True
        except PowerCut:
            finished = False
        monkeypatch.setattr(owner, name, real)
        assert [entry.step for entry in list_checkpoints(folder)] == [6, 7]
        verify(find_checkpoint(folder, 6))
        seen = verify(find_checkpoint(folder, 7)).digest
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
        save(tmp_path, step, keep_last=1)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [110]
    save(tmp_path, 50, keep_last=1)  # behind what is there: the one just made stays
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [50, 110]


def test_not_enough_room_is_told_before_anything_is_written(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(StateError, match=r"step 2 needs 1000000\.0 TB, .* free") as error:
        begin(tmp_path, 2, needs_bytes=10**18)
    assert "keep_last" in error.value.hint
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_refuses_is_told_in_a_sentence(tmp_path, monkeypatch, code, call):
    save(tmp_path, 1)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    partial = begin(tmp_path, 2)
    write_shard(partial, 1, [piece(start=(2, 0), shape=(2, 3))])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StateError, match=os.strerror(code)) as error:
            write_shard(partial, 0, [piece(shape=(2, 3))])
    assert "rank-00000.safetensors could not be written" in error.value.message
    assert error.value.hint
    assert names(partial) == [
        "rank-00001.json",
        "rank-00001.safetensors",
    ]  # the others' is theirs
    write_shard(partial, 0, [piece(shape=(2, 3))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StateError, match="step 2 could not be committed"):
            commit(tmp_path, 2, FACTS, workers=2)
    assert names(tmp_path) == ["step-00000001"]
    verify(find_checkpoint(tmp_path))


def test_a_folder_that_cannot_be_made_is_told_in_a_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StateError, match="step 1 could not be begun"):
        begin(tmp_path / "checkpoints", 1)


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
    digest = verify(find_checkpoint(small_disk / "checkpoints")).digest
    with pytest.raises(StateError, match="step 2 needs 600"):
        begin(small_disk / "checkpoints", 2, needs_bytes=600_000)
    partial = begin(small_disk / "checkpoints", 2)
    write_shard(partial, 0, [big(0)])
    with pytest.raises(StateError, match="No space left on device"):
        write_shard(partial, 1, [big(300_000)])
    abandon(partial)
    assert names(small_disk / "checkpoints") == ["step-00000001"]
    assert verify(find_checkpoint(small_disk / "checkpoints")).digest == digest
    small = [[Piece("w", "uint8", (9,), (0,), (9,), np.arange(9, dtype=np.uint8))]]
    assert save(small_disk / "checkpoints", 3, small).exists()
