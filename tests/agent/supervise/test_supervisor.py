"""How attempts end: finished, stopped or failed; their messages and what they leave."""

import contextlib
import os
import shutil
import signal

import psutil
import pytest

from conftest import Lab, Lived, recorded, send, when
from headway.data import BuildOptions, build_dataset
from headway.errors import DataError, ModelError, RecipeError, RunError, StateError
from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT
from headway.state import verify_checkpoint
from headway.track import RunFolder, account, lock_run, read_run


def descendants() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, make_lab, recipe) -> Lived:
    """A finished run of one worker."""
    return make_lab(tmp_path_factory.mktemp("two-steps")).train(recipe({"train.steps": 2}), workers=1)


@pytest.fixture
def done(two_steps, lab) -> RunFolder:
    """A copy of it that a test may change."""
    return copied(two_steps, lab)


SIX_STEPS = {"train.steps": 6, "checkpoint.every_steps": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_lab, recipe) -> Lived:
    """A finished run of two workers, with a checkpoint of every other step."""
    before = descendants()
    lived = make_lab(tmp_path_factory.mktemp("finished")).train(recipe(SIX_STEPS), workers=2)
    assert descendants() == before
    return lived


@pytest.fixture(scope="module")
def killed(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run of two workers, one of which was killed in step 5, with checkpoints of steps 2 and 4."""
    before = descendants()
    lab, faults = make_lab(tmp_path_factory.mktemp("killed")), FaultPlan().kill(5, rank=1)
    lived = lab.train(recipe(SIX_STEPS), workers=2, faults=faults)
    assert descendants() == before
    return lived


def copied(lived: Lived, lab: Lab) -> RunFolder:
    return RunFolder(shutil.copytree(lived.run.path, lab.root / lived.run.name, symlinks=True))


def test_finished_run_leaves_its_record_and_no_process(finished) -> None:
    assert finished.outcome.state == "finished"
    for rank in (0, 1):
        assert [event["step"] for event in finished.events("step", f"rank-{rank}")] == list(range(1, 7))
    assert finished.events("end", "agent")[0]["outcome"] == "finished"
    for name in ("recipe.json", "environment.json", "tokenizer.json"):
        assert (finished.run.path / name).is_file()
    assert not finished.run.rendezvous.exists()


def test_dead_worker_fails_the_run_with_rank_and_code(killed) -> None:
    assert killed.outcome.state == "failed"
    assert "worker 1 was killed by signal 9 (SIGKILL)" in killed.outcome.reason
    assert "resume" in killed.outcome.hint
    codes = {event["rank"]: event["code"] for event in killed.events("exit", "agent")}
    assert codes[1] == -9
    assert codes[0] != 0


def test_exception_of_a_worker_is_quoted(lab, recipe) -> None:
    lived = lab.train(recipe(), faults=FaultPlan().fail(2, rank=0))
    assert lived.outcome.reason == "worker 0 failed: RuntimeError: injected at start of step 2"
    log = (lived.run.logs / "0001-rank-0.log").read_text()
    assert "Traceback" in log


def test_out_of_memory_names_the_setting_to_change(lab, recipe) -> None:
    lived = lab.train(recipe({"train.microbatch": 4}), faults=FaultPlan().out_of_memory(2, rank=0))
    assert lived.outcome.reason == "worker 0 failed: out of memory"
    assert "train.microbatch (now 4)" in lived.outcome.hint


def test_full_disk_loses_a_save_but_not_the_run(lab, recipe) -> None:
    settings = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
    lived = lab.train(recipe(settings), faults=FaultPlan().full_disk(4, rank=AGENT))
    assert lived.outcome.state == "finished"
    (unsaved,) = lived.events("unsaved", "agent")
    assert (unsaved["step"], unsaved["tier"]) == (4, "disk")
    assert "No space left on device" in unsaved["message"]
    names = sorted(path.name for path in lived.run.checkpoints.iterdir())
    assert names == ["step-00000002", "step-00000006", "step-00000008"]
    for name in names:
        verify_checkpoint(lived.run.checkpoints / name)
    incidents = [incident.text for incident in account(read_run(lived.run)).incidents]
    assert any("step 4 was not saved" in text for text in incidents)


def test_unsaved_last_state_fails_the_run_and_leaves_the_older_checkpoint(lab, recipe) -> None:
    settings = SIX_STEPS | {"checkpoint.keep_last": 1}
    lived = lab.train(recipe(settings), faults=FaultPlan().full_disk(6, rank=AGENT, point="commit"))
    assert lived.outcome.state == "failed"
    assert "the last state could not be saved" in lived.outcome.reason
    assert "No space left on device" in lived.outcome.reason
    assert [path.name for path in lived.run.checkpoints.iterdir()] == ["step-00000004"]
    verify_checkpoint(lived.run.checkpoints / "step-00000004")
    resumed = lab.resume(lived.run)
    assert resumed.outcome.state == "finished"


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_one_signal_saves_and_stops(lab, recipe, number: signal.Signals, workers: int) -> None:
    settings = {"train.steps": 10_000}
    when(lambda: recorded(lab.root, "step", 2), send(number))
    lived = lab.train(recipe(settings), workers=workers)
    assert lived.outcome.state == "stopped"
    assert lived.outcome.exit_status == 75
    last = lived.events("step")[-1]["step"]
    assert 0 < last < 10_000
    assert lived.events("checkpoint", "agent")[-1]["step"] == last
    resumed = lab.resume(lived.run, f"train.steps={last + 2}")
    assert resumed.events("resumed")[-1]["step"] == last
    assert resumed.outcome.state == "finished"


def test_two_signals_stop_at_once(lab, recipe) -> None:
    faults = FaultPlan().stall("compute", step=3, seconds=600)
    when(lambda: recorded(lab.root, "step", 2), send(signal.SIGINT), send(signal.SIGTERM))  # one kind may come once
    lived = lab.train(recipe(), faults=faults)
    assert lived.outcome.state == "stopped"
    assert "at once" in lived.outcome.reason
    assert lived.events("checkpoint", "agent") == []


def test_run_in_use_is_refused(lab, done) -> None:
    before = sorted(done.events.iterdir())
    with lock_run(done), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        lab.resume(done, "train.steps=4")
    assert sorted(done.events.iterdir()) == before


def test_missing_checkpoint_is_reported(lab, done) -> None:
    (done.checkpoints / "step-00000002").rename(done.path / "elsewhere")
    with pytest.raises(StateError, match="saved step 2, but"):
        lab.resume(done, "train.steps=4")


def test_finished_run_says_how_to_continue(lab, done) -> None:
    with pytest.raises(RunError, match="all of its 2 steps") as caught:
        lab.resume(done)
    assert "train.steps=4" in caught.value.hint


def test_forbidden_change_is_refused_and_nothing_is_written(lab, done) -> None:
    before = done.recipe_file.read_bytes()
    with pytest.raises(RecipeError, match=r"train\.lr cannot change"):
        lab.resume(done, "train.lr=0.5", "train.steps=4")
    assert done.recipe_file.read_bytes() == before


def test_indivisible_batch_names_the_nearest_one(lab, recipe) -> None:
    with pytest.raises(RecipeError, match="8 sequences, which 3 workers") as caught:
        lab.train(recipe(), workers=3)
    assert caught.value.hint == "--set train.batch=6 or 9, or --workers 2 or 4"
    assert not lab.root.exists(), "no run folder is created for a recipe that cannot run"


def test_other_data_is_refused_on_resume_and_moved_data_is_not(lab, done, dataset, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("other words " * 500)
    build_dataset(tmp_path / "other", [tmp_path / "a.txt"], BuildOptions(vocab_size=280))
    before = done.recipe_file.read_bytes()
    with pytest.raises(DataError, match="version") as refused:
        lab.resume(done, "train.steps=4", f"data.path={tmp_path / 'other'}")
    assert "change data.version" not in (refused.value.hint or "")
    assert f"headway train --from {done.name} --set data.version= " in (refused.value.hint or "")
    with pytest.raises(RecipeError, match=r"data\.version cannot change"):
        lab.resume(done, "train.steps=4", f"data.path={tmp_path / 'other'}", "data.version=0123456789")
    assert done.recipe_file.read_bytes() == before
    shutil.copytree(dataset, tmp_path / "moved")
    assert lab.resume(done, "train.steps=4", f"data.path={tmp_path / 'moved'}").outcome.state == "finished"


def test_fork_without_state_for_its_optimizer_is_refused(lab, recipe, done) -> None:
    with pytest.raises(StateError, match=r"has the state of adamw, but train\.optimizer is muon") as refused:
        lab.train(recipe({"train.steps": 4, "train.optimizer": "muon"}), origin=done.name)
    assert "model.init=" in (refused.value.hint or "")
    frozen = lab.train(recipe({"train.freeze": ["embed.weight"]})).run
    with pytest.raises(StateError, match=r"embed\.weight was frozen"):
        lab.train(recipe({"train.steps": 4}), origin=frozen.name)
    with pytest.raises(RecipeError, match=r"train\.freeze matches every parameter"):
        lab.train(recipe({"train.freeze": ["**"]}))


def test_hint_about_workers_of_a_resumed_run_does_not_touch_its_batch(lab, done) -> None:
    with pytest.raises(RecipeError, match="8 sequences, which 5 workers") as caught:
        lab.resume(done, "train.steps=4", workers=5)
    assert caught.value.hint == "--workers 4 or 8"


def test_fork_without_steps_is_refused(lab, recipe, done) -> None:
    with pytest.raises(RecipeError, match=r"is at step 2, but train\.steps is 2"):
        lab.train(recipe({"train.steps": 2}), origin=done.name)
    with pytest.raises(StateError, match=r"no checkpoint of step 1|step 1"):
        lab.train(recipe({"train.steps": 4}), origin=f"{done.name}@1")
    with pytest.raises(StateError, match=r"model\.layers is 2 in the checkpoint and 3"):
        lab.train(recipe({"train.steps": 4, "model.layers": 3}), origin=done.name)


def test_shape_that_contradicts_the_checkpoint_is_refused(lab, recipe, done) -> None:
    with pytest.raises(ModelError, match=r"model\.dim is 64 in the recipe and 32"):
        lab.train(recipe({"model": {"init": done.name, "dim": 64}}))


def test_report_lists_changed_conditions_and_not_bystanders(lab, killed) -> None:
    resumed = lab.resume(copied(killed, lab), workers=1)
    assert resumed.outcome.state == "finished"
    incidents = [incident.text for incident in account(read_run(resumed.run)).incidents]
    assert any("worker 1 was killed by signal 9" in text for text in incidents)
    assert any("later steps may differ bitwise: workers" in text for text in incidents)
    assert not any("gloo" in text or "connection" in text for text in incidents)


def test_damaged_recipe_is_named(lab, done) -> None:
    for content in ("", "{", '{"a": 1}'):
        done.recipe_file.write_text(content)
        with pytest.raises(RunError, match=r"recipe\.json is not a valid recipe"):
            lab.resume(done)
    done.recipe_file.unlink()
    with pytest.raises(RunError, match=r"cannot read .*recipe\.json"):
        lab.resume(done)


def test_damaged_environment_file_does_not_stop_a_run(lab, done) -> None:
    done.environment_file.write_text('{"work')
    assert lab.resume(done, "train.steps=4").outcome.state == "finished"


def test_worker_count_is_kept_when_the_record_is_lost(lab, finished) -> None:
    run = copied(finished, lab)
    (run.events / "0001-agent.jsonl").unlink()
    resumed = lab.resume(run, "train.steps=7")
    assert resumed.events("attempt", "agent")[-1]["workers"] == 2


def test_damaged_checkpoint_is_skipped_for_the_one_before(lab, finished, killed) -> None:
    run = copied(killed, lab)
    shard = run.checkpoints / "step-00000004" / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    resumed = lab.resume(run)
    assert resumed.outcome.state == "finished"
    assert (resumed.chain, resumed.digest) == (finished.chain, finished.digest)
    incidents = [incident.text for incident in account(read_run(run)).incidents]
    assert any("rank-00001.safetensors is damaged" in text for text in incidents)
    (back,) = [text for text in incidents if text.startswith("resumed")]
    assert back.startswith("resumed after step 2, 2 steps to redo; from disk, ")


def test_run_fails_when_every_checkpoint_is_damaged(lab, killed) -> None:
    run = copied(killed, lab)
    for shard in run.checkpoints.glob("*/rank-00001.safetensors"):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(bytes(content))
    failed = lab.resume(run)
    assert failed.outcome.state == "failed"
    assert "rank-00001.safetensors is damaged" in failed.outcome.reason


def fill(path, size: int) -> None:
    with contextlib.suppress(OSError):
        path.write_bytes(bytes(size))
