"""A loop of one's own over a policy: the bits of `headway train`, exact states, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import headway as hw
from headway.errors import RecipeError, RequestError, RunError
from headway.policy_client import PolicyClient
from headway.recipe import Recipe
from headway.state import open_checkpoint, verify_checkpoint
from headway.track import read_metric
from train.small_policy import policy_recipe, prompts_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts_dataset(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "rl"))


@pytest.fixture(autouse=True)
def as_before():
    """Clients set what is of the whole process."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(random)
    torch.use_deterministic_algorithms(False)


def client_of(recipe: Recipe, folder: Path, name: str = "client") -> PolicyClient:
    return hw.PolicyClient(recipe, runs=folder, name=name, threads=1)


def steps(client: PolicyClient, count: int, **options: Any) -> list[dict[str, float]]:
    """The loop of the guide."""
    metrics = []
    for _ in range(count):
        answers = client.sample(client.prompts())
        values = client.forward_backward(answers, client.advantages(answers), **options)
        metrics.append({**values, **client.optim_step()})
    return metrics


def weights(client: PolicyClient) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in client.model.named_parameters()}


KL = {"objective": {"kind": "grpo", "kl": "k3", "kl_weight": 0.05}}
KL_IN_REWARD = {"objective": {"kind": "reinforce++", "kl": "k1", "kl_in": "reward", "kl_weight": 0.05}}
CASES = {"plain": {}, "kl": KL, "kl-in-reward": KL_IN_REWARD}


@pytest.mark.parametrize(
    "changes", [pytest.param(case, marks=[pytest.mark.slow] * bool(case), id=name) for name, case in CASES.items()]
)
def test_a_loop_has_the_bits_of_a_run(data: Path, lab, changes: dict[str, Any]) -> None:
    """Chain: losses, norms and places in the data of all steps; digest: weights, optimizer and all; and rollouts."""
    recipe = policy_recipe(data, **changes)
    run = lab.train(recipe, name="run")
    assert run.outcome.state == "finished", run.outcome
    with client_of(recipe, lab.root) as client:
        own = steps(client, recipe.train.steps)
        checkpoint = client.save_state()
    events = run.events("step")
    assert {event["reward"] for event in events} != {0.0}
    for event, metrics in zip(events, own, strict=True):
        assert metrics == {name: event[name] for name in metrics}
    assert open_checkpoint(checkpoint).manifest.chain == run.chain
    assert open_checkpoint(checkpoint).manifest.digest == run.digest
    assert verify_checkpoint(checkpoint).digest == run.digest
    for of_client, of_run in zip(read_metric(client.run, "reward"), read_metric(run.run, "reward"), strict=True):
        assert list(of_client) == list(of_run)


def test_a_saved_state_continues_exactly(data: Path, tmp_path: Path) -> None:
    recipe = policy_recipe(data, train={"steps": 4})
    with client_of(recipe, tmp_path) as client:
        steps(client, 2)
        state = client.save_state(tmp_path / "states")
        whole = steps(client, 2)
        expected = weights(client)
        assert state == tmp_path / "states" / "step-00000002"
        assert json.loads((state / "manifest.json").read_text())["step"] == 2
        tensors = {name for file in state.glob("*.safetensors") for name in load_file(file)}
        assert any("exp_avg" in name for name in tensors)
        steps(client, 1)  # beyond what was saved
        client.load_state(state)
        assert steps(client, 2) == whole
        assert all(torch.equal(expected[name], tensor) for name, tensor in weights(client).items())
    with client_of(recipe, tmp_path, "another") as client:
        client.load_state(state)
        assert client.step == 2
        assert steps(client, 2) == whole


def test_prompts_rewards_and_advantages_of_ones_own(data: Path, tmp_path: Path) -> None:
    with client_of(policy_recipe(data), tmp_path) as client:
        answers = client.sample(["say a", client.prompt("say e", {"letter": "e"})], n=3)
        assert [answer.answer for answer in answers] == [0, 1, 2] * 2
        assert len({answer.sample for answer in answers[:3]}) == len({answer.sample for answer in answers[3:]}) == 1
        assert len({answer.token_ids for answer in answers}) == 6
        before = client.logprobs(answers)
        for answer, values in zip(answers, before, strict=True):
            assert values.tolist() == list(np.float32(answer.logprobs)), "the sampler's, bit for bit"
        advantages = [1.0, -1.0, 0.0, 0.5, -0.5, 0.0]
        client.forward_backward(answers, advantages)
        assert client.optim_step(lr=0.05)["lr"] == 0.05
        after = client.logprobs(answers)
        moved = [float((new - old).sum()) for new, old in zip(after, before, strict=True)]
        assert moved[0] > moved[1]
        assert moved[3] > moved[4]


def test_an_advantage_per_token_is_that_of_each_token(data: Path, tmp_path: Path) -> None:
    with client_of(policy_recipe(data), tmp_path) as client:
        answers = client.sample(client.prompts(2), n=2)
        numbers = [0.5, -0.5, 0.25, -1.0]
        by_token = [np.full(len(answer.token_ids), number) for answer, number in zip(answers, numbers, strict=True)]
        assert client.forward_backward(answers, numbers) == client.forward_backward(answers, by_token)
        before = client.logprobs(answers)
        client.optim_step(lr=0.0)
        first = [np.zeros(len(answer.token_ids)) for answer in answers]
        first[0][0] = 1.0  # only this token is to become likelier
        client.forward_backward(answers, first)
        client.optim_step(lr=0.01)
        assert client.logprobs(answers)[0][0] > before[0][0]


def test_gradients_of_several_calls_add_up(data: Path, tmp_path: Path) -> None:
    with client_of(policy_recipe(data, objective={"kind": "grpo", "normalizer": "sequence"}), tmp_path) as client:
        answers = client.sample(client.prompts(2), n=2)
        parts, gradients = {"first": slice(0, 2), "second": slice(2, 4)}, {}
        for name, part in parts.items():
            client.forward_backward(answers[part], [1.0, -0.5])
            gradients[name] = {key: tensor.grad.clone() for key, tensor in client.model.named_parameters()}
            client.model.zero_grad()
        for part in parts.values():
            client.forward_backward(answers[part], [1.0, -0.5])
        for key, tensor in client.model.named_parameters():
            assert gradients["first"][key].any()
            torch.testing.assert_close(tensor.grad, gradients["first"][key] + gradients["second"][key])
        with pytest.raises(RunError, match="gradients that no update has used"):
            client.save_state()
        client.optim_step()
        assert all(tensor.grad is None for tensor in client.model.parameters())


def test_ratios_compare_with_log_probabilities_of_before(data: Path, tmp_path: Path) -> None:
    recipe = policy_recipe(data, rl={"updates": 2})
    with client_of(recipe, tmp_path) as client:
        answers = client.sample(client.prompts(4))
        proximal = client.logprobs(answers)
        client.forward_backward(answers, client.advantages(answers), proximal=proximal)
        client.optim_step(lr=0.05)
        second = client.forward_backward(answers, client.advantages(answers), proximal=proximal)
        assert second["ratio"] != pytest.approx(1, abs=1e-4)
        assert second["mismatch"] == 0.0, "of those before and the sampler's"


def test_wrong_calls_are_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(policy_recipe(data), tmp_path) as client:
        answers = client.sample(client.prompts(1), n=2)
        with pytest.raises(RunError, match="2 answers, but 1 advantages"):
            client.forward_backward(answers, [1.0])
        with pytest.raises(RunError, match=r"advantages of shape \(1,\) for an answer of \d+ tokens"):
            client.forward_backward(answers, [np.zeros(1), 1.0])
        with pytest.raises(RunError, match="no gradients to update"):
            client.optim_step()
        with pytest.raises(RequestError, match="but the model takes"):
            client.sample(["long " * 100])
        before = weights(client)
        client.forward_backward(answers, [-1.0, 1.0])
        next(client.model.parameters()).grad.fill_(torch.nan)
        with pytest.raises(RunError, match=r"step 1: the loss is .* norm of its gradients nan: nothing is updated"):
            client.optim_step()
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(client).items())
        assert client.step == 0


def test_values_that_cannot_be_meant_are_refused_with_the_value(data: Path, tmp_path: Path) -> None:
    with client_of(policy_recipe(data), tmp_path) as client:
        answers = client.sample(client.prompts(1), n=2)
        unscorable = [answers[0], replace(answers[1], score=replace(answers[1].score, reward=np.nan))]
        for call, message in [
            (lambda: client.sample("say a"), "prompts is a text: give a list of them"),
            (lambda: client.sample(["say a"], n=0), "n is 0, not a whole number of at least 1"),
            (lambda: client.prompts(0), "count is 0, not a whole number"),
            (lambda: client.prompts("say a"), "count is 'say a', not a whole number"),
            (lambda: client.advantages(unscorable), "the reward of answer 1 is nan, not a finite number"),
            (lambda: client.forward_backward([], []), "there are no answers to train on"),
            (lambda: client.forward_backward(answers, [1.0, np.nan]), "the advantage of answer 1 is nan"),
            (lambda: client.forward_backward(answers, [1, 1], weights=[np.inf, 1]), "the weight of answer 0 is inf"),
            (lambda: client.optim_step(lr=-0.1), "lr is -0.1, not a finite number of at least 0"),
            (lambda: client.optim_step(lr=np.nan), "lr is nan"),
        ]:
            with pytest.raises(RunError, match=message):
                call()
        assert client.sample(client.prompts(np.int64(1)), n=1)


def test_a_closed_client_is_refused(data: Path, tmp_path: Path) -> None:
    with client_of(policy_recipe(data), tmp_path) as client:
        answers = client.sample(client.prompts(1), n=2)
    client.close()
    for call in [
        client.prompts, lambda: client.prompt("say a"), lambda: client.sample(["say a"]),
        lambda: client.advantages(answers), lambda: client.logprobs(answers),
        lambda: client.forward_backward(answers, [1.0, -1.0]), client.optim_step, client.save_state,
        lambda: client.load_state(tmp_path),
    ]:  # fmt: skip
        with pytest.raises(RunError, match="the client of run client is closed"):
            call()


def test_only_policies_are_taken(recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"objective\.kind is pretrain, but PolicyClient trains a policy"):
        PolicyClient(recipe(), runs=tmp_path)
