"""What only a GPU shows: the same losses as on a CPU, exact resumption, and a ledger made of device time."""

import pytest

from headway.recipe import FaultPlan
from headway.track import account, compare_runs, read_run

pytestmark = pytest.mark.gpu
ON_GPU = {"train.device": "cuda", "train.steps": 12, "train.deterministic": True}


def losses(result) -> list[float]:
    assert result.outcome.state == "finished", result.outcome
    return [event["loss"] for event in result.events("step")]


def test_gpu_losses_match_cpu_losses(lab, recipe) -> None:
    settings = ON_GPU | {"eval.every_steps": 6, "eval.windows": 4}
    gpu = lab.train(recipe(settings), workers=1)
    cpu = lab.train(recipe(settings | {"train.device": "cpu"}), workers=1)
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-3)
    evaluations = [[event["loss"] for event in result.events("eval")] for result in (gpu, cpu)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_and_resumed_on_a_gpu_is_exact(lab, recipe, dtype: str) -> None:
    settings = ON_GPU | {"train.dtype": dtype, "checkpoint.every_steps": 4}
    unharmed = lab.train(recipe(settings), workers=1)
    killed = lab.train(recipe(settings), workers=1, faults=FaultPlan().kill(7))
    assert killed.outcome.state == "failed"
    resumed = lab.resume(killed.run)
    assert resumed.digest == unharmed.digest
    assert compare_runs(resumed.run, unharmed.run).equal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_worker_killed_on_a_gpu_resumes_from_memory_exactly(lab, recipe, dtype: str) -> None:
    """Copies run beside the next step: what is restored must be what was there when they began."""
    settings = ON_GPU | {"train.dtype": dtype, "checkpoint.memory_every_steps": 1, "train.restarts": 3}
    unharmed = lab.train(recipe(settings | {"checkpoint.memory_every_steps": 0}), workers=1)
    faults = FaultPlan().kill(5).kill(8, attempt=2, point="save").kill(10, attempt=3, point="saved")
    result = lab.train(recipe(settings), workers=1, faults=faults)
    assert result.outcome.state == "finished", result.outcome
    assert len(result.events("attempt", "agent")) == 4
    assert [event["step"] for event in result.events("resumed")[1:]] >= [3, 6, 8]
    assert result.digest == unharmed.digest
    assert compare_runs(result.run, unharmed.run).equal


def test_injected_stall_on_a_gpu_is_charged_to_its_account(lab, recipe) -> None:
    settings = ON_GPU | {"train.steps": 30, "checkpoint.every_steps": 10}
    # in the first save: a later one is left out where the disk is still at work on the one before
    faults = FaultPlan().stall("data", 15, 1.0).stall("save", 10, 1.0)
    ledger = account(read_run(lab.train(recipe(settings), 1, faults).run))
    plain = account(read_run(lab.train(recipe(settings), 1).run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    for name in ("data stall", "checkpoint stall"):
        assert ledger.seconds(name) - plain.seconds(name) == pytest.approx(1.0, rel=0.05)


def test_stopping_on_a_gpu_saves_the_last_step(lab, recipe) -> None:
    import os
    import signal
    import threading

    threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    result = lab.train(recipe(ON_GPU | {"train.steps": 1_000_000}), workers=1)
    assert result.outcome.state == "stopped", result.outcome
    assert result.events("checkpoint", "agent")[-1]["step"] == result.events("step")[-1]["step"]


@pytest.mark.parametrize("batches", [{}, {"train.batch": 4, "train.batch_ramp": [[7, 8]], "train.microbatch": 2}])
def test_cuda_graph_replay_is_bitwise_equal(lab, recipe, batches) -> None:
    """Across a kill and a resume, and where the batch grows and is passed in parts."""
    settings = ON_GPU | batches | {"train.dtype": "bfloat16", "checkpoint.every_steps": 4}
    plain = lab.train(recipe(settings | {"train.cuda_graphs": False}), workers=1)
    settings |= {"train.cuda_graphs": True}
    replayed = lab.train(recipe(settings), workers=1)
    assert losses(replayed) == losses(plain)
    assert replayed.digest == plain.digest
    killed = lab.train(recipe(settings), workers=1, faults=FaultPlan().kill(9))
    assert lab.resume(killed.run).digest == plain.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_in_backward_is_bitwise_equal(lab, recipe, dtype: str) -> None:
    settings = ON_GPU | {"train.dtype": dtype, "train.weights": dtype, "train.clip": 0.0}
    plain = lab.train(recipe(settings | {"train.cuda_graphs": False}), workers=1)
    early = lab.train(recipe(settings | {"train.update_in_backward": True}), workers=1)
    assert losses(early) == losses(plain)
    assert early.digest == plain.digest
