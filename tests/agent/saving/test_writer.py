import threading

import numpy as np
import pytest

from eventually import CEILING_S, eventually
from headway.agent.fd_store import FdStore
from headway.agent.saving import writer as writer_module
from headway.agent.saving.buffers import LocalMemory
from headway.agent.saving.restore_points import newest_on_disk
from headway.agent.saving.snapshots import SnapshotBuffers, StateSnapshot
from headway.agent.saving.writer import CheckpointWriter
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.recipe import Checkpoint as Rules
from headway.recipe import FaultPlan, Store
from headway.recipe.faults import AGENT
from headway.state import (
    CheckpointFacts,
    PieceShape,
    list_checkpoints,
    open_checkpoint,
    plan_buffer,
    read_box,
    verify_checkpoint,
)
from headway.state.address import address_in_store, open_address, store_url

FACTS = CheckpointFacts(cursor=3, chain="c", data_version="v", mesh={"shard": 2}, recipe={"name": "x"})
SHAPE = (3000, 2)


def value(step):
    return np.arange(6000, dtype="<u4").reshape(SHAPE) * step


class Bench:
    """A writer, and hand-filled memory of two workers; the second has a frozen tensor too."""

    def __init__(self, folder, rules=None, faults=None):
        self.folder, self.memory = folder, SnapshotBuffers(LocalMemory(FdStore()))
        rows = [(0, 1000), (1000, 2000)]
        halves = [PieceShape("w", "float32", SHAPE, (first, 0), (count, 2)) for first, count in rows]
        frozen = PieceShape("frozen", "bfloat16", (5,), (0,), (5,))
        self.memory.make({0: plan_buffer([halves[0]], []), 1: plan_buffer([halves[1]], [frozen])}, 4)
        injector = AgentFaultInjector(faults or FaultPlan(), folder.with_name(f"{folder.name}-faults"))
        self.writer = CheckpointWriter(folder, rules or Rules(), "run", self.memory, injector, 8)

    def filled(self, step, last=False, tiers=("memory", "disk")):
        """A complete state of a step, in its own buffers."""
        rng = {str(rank): f"{step}{rank}==" for rank in (0, 1)}
        snapshot = StateSnapshot(step, 1, 2, tiers, FACTS, last, rng=rng)
        for rank in (0, 1):
            self.memory.take(snapshot, rank, self.memory.free(rank)[0])
            buffer = self.memory.buffer(snapshot, rank).local()
            for part in buffer.plan.parts:
                for piece in part.pieces:
                    bits = value(step)[piece.box.slices((0, 0))] if piece.name == "w" else np.arange(5) * 7
                    buffer.bits(part, piece)[...] = bits
            buffer.mark(step, step)
        return snapshot

    def save(self, *snapshots):
        """Write snapshots one after the other, and return all results."""
        for snapshot in snapshots:
            self.writer.write(snapshot)
            assert not self.writer.idle
        return self.wait()

    def wait(self, until=lambda _results: False):
        """Results until the writer is idle, or until a condition holds."""
        results = []

        def is_done():
            results.extend(self.writer.results())
            return self.writer.idle or until(results)

        eventually(is_done, poll_s=0.001)
        return results

    def steps(self):
        return [entry.step for entry in list_checkpoints(self.folder)]


def assert_intact(path, step):
    verify_checkpoint(path)
    checkpoint = open_checkpoint(path)
    assert np.array_equal(read_box(checkpoint, "w", (0, 0), SHAPE), value(step))
    assert np.array_equal(read_box(checkpoint, "frozen", (0,), (5,)), np.arange(5) * 7)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.workers, manifest.cursor, manifest.mesh) == (step, 2, 3, {"shard": 2})
    assert manifest.rng == {"0": f"{step}0==", "1": f"{step}1=="}


def test_snapshot_becomes_a_checkpoint(tmp_path):
    bench = Bench(tmp_path / "checkpoints")
    assert bench.writer.idle
    snapshot = bench.filled(7)
    disk, end = bench.save(snapshot)
    path = tmp_path / "checkpoints" / "step-00000007"
    assert_intact(path, 7)
    assert (disk.snapshot, disk.tier, disk.error, disk.over) == (snapshot, "disk", None, False)
    assert disk.digest == open_checkpoint(path).manifest.digest
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert files == ["rank-00000.safetensors", "rank-00001-still.safetensors", "rank-00001.safetensors"]
    assert disk.bytes == sum((path / file).stat().st_size for file in files)
    assert disk.seconds > 0
    assert (end.snapshot, end.error, end.over) == (snapshot, None, True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_results_are_in_order_and_old_checkpoints_are_pruned(tmp_path):
    bench = Bench(tmp_path, Rules(keep_last=2, keep_every_steps=10))
    steps = [10, 11, 12, 13]
    results = bench.save(*[bench.filled(step) for step in steps])
    assert [(result.snapshot.step, result.tier, result.over) for result in results] == [
        (step, *what) for step in steps for what in (("disk", False), ("memory", True))
    ]
    assert bench.steps() == [10, 12, 13]
    for step in bench.steps():
        assert_intact(tmp_path / f"step-{step:08d}", step)
    frozen = {(tmp_path / f"step-{step:08d}" / "rank-00001-still.safetensors").stat().st_ino for step in bench.steps()}
    assert len(frozen) == 1  # written once


def test_snapshot_for_memory_only_is_not_written(tmp_path):
    bench = Bench(tmp_path)
    (end,) = bench.save(bench.filled(3, tiers=("memory",)))
    assert (end.over, end.error) == (True, None)
    assert bench.steps() == []


@pytest.mark.parametrize("point", ["write", "written", "commit"])
def test_full_disk_costs_one_checkpoint(tmp_path, point):
    bench = Bench(tmp_path, Rules(keep_last=9), FaultPlan().full_disk(step=2, rank=AGENT, point=point))
    results = bench.save(*[bench.filled(step) for step in (1, 2, 3)])
    errors = {result.snapshot.step: result.error for result in results if result.tier == "disk"}
    assert (errors[1], errors[3]) == (None, None)
    assert "No space left on device" in errors[2].message
    assert "step 2" in errors[2].message
    assert errors[2].hint
    assert [result.over for result in results] == [False, True] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    for step in (1, 3):
        assert_intact(tmp_path / f"step-{step:08d}", step)


def test_fault_for_a_worker_does_not_fire_in_the_agent(tmp_path):
    bench = Bench(tmp_path, faults=FaultPlan().full_disk(step=2, rank=0).full_disk(step=2, rank=AGENT, attempt=2))
    assert all(result.error is None for result in bench.save(bench.filled(2)))


def test_bug_is_reported_and_the_writer_continues(tmp_path):
    bench = Bench(tmp_path, faults=FaultPlan().fail(step=1, rank=AGENT, point="written"))
    first, _, second, _ = bench.save(bench.filled(1), bench.filled(2))
    assert first.error.message == "RuntimeError: injected at written of step 1"
    assert second.error is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


def test_unwritable_folder_is_reported_once(tmp_path):
    """A file in place of the folder stops root, too."""
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    bench = Bench(folder, Rules(retry_s=60))
    disk, _ = bench.save(bench.filled(1))
    assert "step 1 could not be started" in disk.error.message
    assert bench.writer.trouble is None
    folder.unlink()
    disk, _ = bench.save(bench.filled(2))
    assert disk.error is None
    assert_intact(folder / "step-00000002", 2)


def test_last_state_is_retried_until_it_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "RETRY_AFTER_S", 0.02)
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    bench = Bench(folder, Rules(retry_s=CEILING_S))
    troubles, limits = [], []

    def repair():
        troubles.append(eventually(lambda: bench.writer.trouble))
        limits.append(bench.writer.gives_up_after_s)
        folder.unlink()

    thread = threading.Thread(target=repair)
    thread.start()
    disk, end = bench.save(bench.filled(9, last=True))
    thread.join()
    assert "step 9 could not be started" in troubles[0]
    assert limits == [CEILING_S]
    assert (disk.error, end.over, bench.writer.trouble) == (None, True, None)
    assert_intact(folder / "step-00000009", 9)


@pytest.mark.parametrize("retry_s", [0, 0.1])
def test_last_state_that_cannot_be_written_is_given_up(tmp_path, retry_s):
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    bench = Bench(folder, Rules(retry_s=retry_s))
    disk, end = bench.save(bench.filled(9, last=True))
    assert "step 9 could not be started" in disk.error.message
    assert disk.seconds >= retry_s
    assert (end.over, bench.writer.trouble) == (True, None)


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    """After a restart the same step is saved again."""
    bench = Bench(tmp_path)
    again = bench.filled(4)
    for rank in (0, 1):
        buffer = bench.memory.buffer(again, rank).local()
        buffer.bits(buffer.plan.parts[0], buffer.plan.parts[0].pieces[0])[...] = 1
    first, _, second, _ = bench.save(again, bench.filled(4))
    assert first.digest != second.digest
    assert_intact(tmp_path / "step-00000004", 4)


def test_newest_intact_checkpoint(tmp_path):
    assert newest_on_disk(tmp_path / "nowhere") == (None, [])
    bench = Bench(tmp_path, Rules(keep_last=9))
    bench.save(*[bench.filled(step) for step in (1, 2, 3)])
    assert newest_on_disk(tmp_path)[0].step == 3
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b"{}")
    assert newest_on_disk(tmp_path)[0].step == 2
    (tmp_path / "step-00000002" / "rank-00001.safetensors").unlink()
    assert newest_on_disk(tmp_path)[0].step == 1
    # and the writer links its frozen file
    disk, _ = bench.save(bench.filled(4))
    assert disk.error is None
    still = [tmp_path / f"step-0000000{step}" / "rank-00001-still.safetensors" for step in (1, 4)]
    assert len({path.stat().st_ino for path in still}) == 1


def test_snapshot_goes_to_disk_and_store(tmp_path):
    """With a folder as the store; network stores have their own tests."""
    (tmp_path / "store").mkdir()
    rules = Rules(keep_last=9, store=Store(url=f"file://{tmp_path}/store", keep_last=2))
    bench = Bench(tmp_path / "checkpoints", rules)
    results = []
    for step, tiers in ((1, ("memory", "disk", "store")), (2, ("memory", "store")), (3, ("memory", "disk", "store"))):
        results += bench.save(bench.filled(step, tiers=tiers))
    assert [(result.snapshot.step, result.tier) for result in results if result.tier != "memory"] == [
        (1, "disk"), (1, "store"), (2, "store"), (3, "disk"), (3, "store"),
    ]  # fmt: skip
    assert [result.snapshot.step for result in results if result.over] == [1, 2, 3]
    assert not any(result.error for result in results)
    digests = {(result.snapshot.step, result.tier): result.digest for result in results}
    assert digests[1, "disk"] == digests[1, "store"]
    assert bench.steps() == [1, 3]
    url = store_url(rules.store, "run")
    for step in (2, 3):
        checkpoint = open_address(address_in_store(url, step))
        assert np.array_equal(read_box(checkpoint, "w", (0, 0), SHAPE), value(step))
        assert checkpoint.manifest.digest == digests[step, "store"]


def test_failing_store_costs_no_checkpoint_on_disk(tmp_path):
    (tmp_path / "store").write_text("in the way")
    rules = Rules(store=Store(url=f"file://{tmp_path}/store"))
    bench = Bench(tmp_path / "checkpoints", rules)
    results = bench.save(bench.filled(1, tiers=("memory", "disk", "store")))
    assert [result.over for result in results if result.tier == "memory"].count(True) == 1
    assert {result.tier: result.error is None for result in results} == {"disk": True, "memory": True, "store": False}
    assert_intact(tmp_path / "checkpoints" / "step-00000001", 1)


def test_slow_store_blocks_neither_memory_nor_disk(tmp_path, monkeypatch):
    """Uploads requested while one is under way are skipped and reported; the last one waits."""
    monkeypatch.setattr("headway.agent.saving.writer.SMALL_BYTES", 0)
    (tmp_path / "store").mkdir()
    rules = Rules(keep_last=1, store=Store(url=f"file://{tmp_path}/store", keep_last=9))
    bench, everywhere = Bench(tmp_path / "checkpoints", rules), ("memory", "disk", "store")
    store_works = threading.Event()
    bench.writer.before_upload = lambda: store_works.wait(CEILING_S)
    for snapshot in (bench.filled(1, tiers=everywhere), bench.filled(2, tiers=everywhere), bench.filled(3)):
        bench.writer.write(snapshot)
    results = bench.wait(
        until=lambda results: any((result.snapshot.step, result.tier) == (3, "disk") for result in results)
    )
    assert all(result.error for result in results if result.tier == "store"), "the disk did not wait for the store"
    store_works.set()
    results += bench.wait() + bench.save(bench.filled(4, last=True, tiers=everywhere))
    late = {result.snapshot.step: result.error for result in results if result.tier == "store"}
    assert late[1] is None
    assert late[4] is None
    assert "still under way" in late[2].message
    assert bench.steps() == [4], "step 1 was pruned here while it was uploaded"
    url = store_url(rules.store, "run")
    for step in (1, 4):
        verify_checkpoint(open_address(address_in_store(url, step)).source)
