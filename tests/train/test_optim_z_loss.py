"""The z-loss and the soft cap, plain and over a vocabulary that is shared out, against autograd in float64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headway.models.loss import IGNORED, Loss
from headway.parallel.vocab_parallel import LogitOptions, cross_entropy_of_logits, shared_loss
from headway.parallel.world import Axis
from processes import run_ranks

CASES = [(None, 0.01), (3.0, 0.01), (3.0, 0.0), (None, 0.0)]


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 6, generator=generator), torch.randn(11, 6, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORED
    return x, weight, labels


def truth(softcap: float | None, z_loss: float) -> dict[str, Tensor]:
    """By the definition, a token at a time; the gradients by autograd."""
    x, weight, labels = drawn()
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for row, label in zip(x.flatten(0, 1), labels.flatten().tolist(), strict=True):
        logits = weight @ row
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        spread = logits.exp().sum().log()
        if label != IGNORED:
            loss = loss + spread - logits[label] + z_loss * spread**2
    (loss * 0.5).backward()
    return {"loss": loss.detach(), "x": x.grad, "weight": weight.grad}


def assert_near(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            actual[name].double(), value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("softcap", "z_loss"), CASES)
def test_the_plain_loss(softcap: float | None, z_loss: float, monkeypatch) -> None:
    monkeypatch.setattr("headway.models.loss.CHUNK_ELEMENTS", {"cpu": 33})  # three tokens at a time
    x, weight, labels = drawn()
    x.requires_grad_(), weight.requires_grad_()
    loss = Loss(softcap)
    loss.z_loss = z_loss
    summed = loss(x, weight, labels)
    (summed * 0.5).backward()
    assert_near({"loss": summed.detach(), "x": x.grad, "weight": weight.grad}, truth(softcap, z_loss))
    with torch.no_grad():  # an evaluation measures the cross-entropy alone
        plain = loss(x, weight, labels)
    assert float(plain) == pytest.approx(float(truth(softcap, 0.0)["loss"]), rel=1e-5)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_loss_of_a_class_of_ones_own(z_loss: float) -> None:
    x, weight, labels = drawn()
    x.requires_grad_(), weight.requires_grad_()
    loss = cross_entropy_of_logits(x @ weight.T, labels, Axis(), None, z_loss)
    (loss * 0.5).backward()
    assert_near({"loss": loss.detach(), "x": x.grad, "weight": weight.grad}, truth(None, z_loss))
    with torch.no_grad():
        plain = cross_entropy_of_logits(x @ weight.T, labels, Axis(), None, z_loss)
    assert float(plain) == pytest.approx(float(truth(None, 0.0)["loss"]), rel=1e-5)


def story(rank: int, workers: int) -> dict[str, Tensor]:
    """Eleven rows of the head over two workers: six and five."""
    mesh = init_device_mesh("cpu", (workers,))
    axis = Axis(workers, rank, mesh.get_group())
    results: dict[str, Any] = {}
    for number, (softcap, z_loss) in enumerate(CASES):
        x, whole, labels = drawn()
        x.requires_grad_()
        weight = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        loss = shared_loss(axis, False, LogitOptions(softcap, z_loss), x, weight, labels)
        (loss * 0.5).backward()
        results |= {
            f"{number}/loss": loss.detach(),
            f"{number}/x": x.grad,
            f"{number}/weight": weight.grad.full_tensor(),
        }
        if softcap is None:
            share = weight.detach().to_local().requires_grad_()
            again = x.detach().requires_grad_()
            loss = cross_entropy_of_logits(again @ share.T, labels, axis, 11, z_loss)
            (loss * 0.5).backward()
            dist.all_reduce(again.grad)
            results |= {f"logits {number}/loss": loss.detach(), f"logits {number}/x": again.grad}
    return results


def test_a_vocabulary_that_is_shared_out(tmp_path) -> None:
    for results in run_ranks(tmp_path, 2, story):
        for number, case in enumerate(CASES):
            wanted = truth(*case)
            assert_near({name: results[f"{number}/{name}"] for name in wanted}, wanted)
            if case[0] is None:
                assert_near(
                    {name: results[f"logits {number}/{name}"] for name in ("loss", "x")},
                    {n: wanted[n] for n in ("loss", "x")},
                )
