"""Objectives on meshes of two workers: sums, gradients and scores of plain PyTorch."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from headway.data.loader import Batch
from headway.models import empty_decoder, init_weights, initial_weight
from headway.parallel import World, finish_gradients, make_mesh, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale, TeacherTargets
from headway.recipe import Model, Recipe
from headway.recipe.load import parse_recipe
from headway.recipe.objective import Distill, Dpo, Kto, Orpo, Reward, Sft, SimPo
from headway.recipe.policy import PolicyGradient
from headway.recipe.rl import Rl
from headway.state.tensors import ModelShare, fill
from headway.train.objectives import make_objective
from headway.train.objectives.policy import ADVANTAGE, BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS, WEIGHT
from headway.train.objectives.teacher import Teacher
from headway.train.optim import build_optimizer, set_step
from processes import run_ranks

VOCABULARY, ROWS, SEQ, WIDTH = 61, 4, 16, 4
MESHES = {
    "shard 2": {"shard": 2},
    "tensor 2": {"tensor": 2, "shard": 1},
    "pipeline 2": {"pipeline": 2, "shard": 1},
    "context 2": {"context": 2, "shard": 1},
}
OBJECTIVE = Dpo(kind="dpo", beta=0.7)


def make_recipe(mesh: dict[str, Any]) -> Recipe:
    values = {
        "model": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": VOCABULARY},
        "data": {"path": "nowhere", "seq": SEQ},
        "train": {"batch": ROWS, "microbatch": 1},
        "parallel": mesh,
    }
    return parse_recipe(values, {}, "test")


def rows() -> DeviceBatch:
    """Rows of two pairs; the last row has one, and padding."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQ), generator=generator)
    documents = (torch.arange(SEQ) // 4).expand(ROWS, SEQ).int().clone()
    documents[-1, 8:] = 2
    labels = tokens.roll(-1, dims=1).clone()
    labels[:, 3::4] = -100
    labels[:, 4] = -100
    labels[-1, 8:] = -100
    weight = torch.ones(ROWS, WIDTH)
    weight[-1, 2:] = 0
    reference = torch.randn(ROWS, WIDTH, generator=generator) - 12
    return DeviceBatch(tokens, labels, documents, {"weight": weight, "reference": reference * (weight > 0)})


PAIRS = 7


def plain(recipe: Recipe) -> dict[str, torch.Tensor]:
    model = empty_decoder(recipe.model)
    init_weights(model, seed=0)
    batch = rows()
    scores = model(batch.inputs, documents=batch.documents).log_softmax(-1)
    chosen = scores.gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2).where(batch.labels != -100, 0.0)
    sums = torch.stack([(chosen * (batch.documents == d)).sum(dim=1) for d in range(WIDTH)], dim=1)
    present = batch.columns["weight"] > 0
    ratios = (sums - batch.columns["reference"]).where(present, 0.0)
    margins = OBJECTIVE.beta * (ratios[:, ::2] - ratios[:, 1::2])
    loss = -torch.nn.functional.logsigmoid(margins)[present[:, ::2]].sum() / PAIRS
    loss.backward()
    results = {name: parameter.grad for name, parameter in model.named_parameters()}
    accuracy = (margins[present[:, ::2]] > 0).float().mean()
    return results | {"loss": loss.detach(), "accuracy": accuracy, "scores": sums.where(present, 0.0).detach()}


def gradients_of(spread: Any) -> dict[str, torch.Tensor]:
    """Return whole gradients by name, after a pass."""
    parameters = dict(spread.model.named_parameters())
    finish_gradients(parameters, spread.missing)
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        for name, parameter in parameters.items()
    }


def story(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    objective = make_objective(OBJECTIVE)
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world, objective=objective)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    each = ROWS // world.data.size
    mine = slice(each * world.data.rank, each * (world.data.rank + 1))
    batch = rows().rows(mine.start, mine.stop)
    with torch.no_grad():
        scores = spread.document_logprobs(batch)
        spread.rest()
    values = spread.passes(batch, SumScale((1 / PAIRS,) * len(objective.names), 1.0))
    results = gradients_of(spread)
    if world.axis("tensor").rank:
        values = torch.zeros_like(values)
    values = world.sum(values)
    results |= {"loss": values[0], "accuracy": values[1]}
    if scores is not None:
        results[f"scores {mine.start}"] = scores
    return results


DISTILL = Distill(kind="distill", teacher="t", top_k=5, temperature=1.7, divergence="reverse", next_token=0.25)
LABELS = int((rows().labels != -100).sum())


def teacher_model(recipe: Recipe) -> Model:
    """Another shape than the student's, with a vocabulary that has fewer rows."""
    return recipe.model.model_copy(update={"layers": 3, "kv_heads": 4, "vocab_size": VOCABULARY - 2, "init_std": 0.3})


def plain_distillation(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The loss and gradients from the definition, with all logits, in float64."""
    student, teacher = (empty_decoder(model).double() for model in (recipe.model, teacher_model(recipe)))
    for decoder in (student, teacher):
        init_weights(decoder, seed=0)
    batch, warmth = rows(), DISTILL.temperature
    with torch.no_grad():
        p = (teacher(batch.inputs, documents=batch.documents) / warmth).softmax(-1)
    logits = student(batch.inputs, documents=batch.documents)
    q, total = (logits / warmth).softmax(-1), 0.0
    for row, place in (batch.labels != -100).nonzero().tolist():
        best = p[row, place].topk(DISTILL.top_k)
        of_teacher = [*best.values, 1 - best.values.sum()]
        of_student = [*q[row, place][best.indices], 1 - q[row, place][best.indices].sum()]
        kl = sum(b * (b.log() - a.log()) for a, b in zip(of_teacher, of_student, strict=True))
        nll = -logits[row, place].log_softmax(-1)[batch.labels[row, place]]
        total = total + 0.75 * warmth**2 * kl + 0.25 * nll
    loss = total / LABELS
    loss.backward()
    return {name: parameter.grad.float() for name, parameter in student.named_parameters()} | {
        "loss": loss.detach().float()
    }


def distillation(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """A step with a live teacher on the same mesh."""
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    targets = TeacherTargets(DISTILL.top_k, DISTILL.temperature)
    objective = make_objective(DISTILL)
    spreads = []
    for model, measured in ((recipe.model, objective), (teacher_model(recipe), targets)):
        own = recipe.model_copy(update={"model": model})
        spread = parallelize_model(empty_decoder(model, "meta"), own, world, objective=measured)
        for name, parameter in spread.model.named_parameters():
            fill(name, parameter, initial_weight(model, name, tuple(parameter.shape), 0))
        spreads.append(spread)
    student = replace(spreads[0], teach=Teacher(spreads[1], targets).teach)
    each = ROWS // world.data.size
    batch = rows().rows(each * world.data.rank, each * (world.data.rank + 1))
    batch = replace(batch, columns={})
    values = student.passes(batch, SumScale((1 / LABELS,) * len(objective.names), 1.0))
    results = gradients_of(student)
    if world.axis("tensor").rank:
        values = torch.zeros_like(values)
    return results | {"loss": world.sum(values)[0]}


OTHERS = {
    "sft": Sft(kind="sft"),
    "orpo": Orpo(kind="orpo", beta=0.4),
    "simpo": SimPo(kind="simpo", margin=0.7),
    "kto": Kto(kind="kto", beta=0.3, undesirable_weight=1.5),
    "ipo": Dpo(kind="dpo", loss="ipo", beta=0.3),
}
"""Their formulas are those of the papers on one process (tests/train/test_objectives.py)."""


def weighted_rows() -> DeviceBatch:
    """The rows with unequal weights of pairs, and labels of answers."""
    batch = rows()
    weight = batch.columns["weight"] * torch.tensor([0.5, 0.5, 2.0, 2.0])
    desirable = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    return replace(batch, columns={**batch.columns, "weight": weight, "desirable": desirable})


def scale_of(objective: Any) -> SumScale:
    batch = weighted_rows()
    columns = {name: column.numpy() for name, column in batch.columns.items()}
    labels, documents = batch.labels.numpy(), batch.documents.numpy()
    host = Batch(batch.inputs.numpy(), labels, int((labels != -100).sum()), documents, columns)
    return SumScale(tuple(1 / count for count in objective.counts(host)), 1.0)


def plain_objective(recipe: Recipe, kind: str) -> dict[str, torch.Tensor]:
    """The sums and gradients of all rows at once, from the logits of a plain model in float64."""
    objective, batch = make_objective(OTHERS[kind], weighted=True), weighted_rows()
    model = empty_decoder(recipe.model).double()
    init_weights(model, seed=0)
    scores = model(batch.inputs, documents=batch.documents).log_softmax(-1)
    logprobs = scores.gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2).where(batch.labels != -100, 0.0)
    values = scale_of(objective).of(objective.measure(logprobs, batch))
    values[: objective.terms].sum().backward()
    gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    return gradients | {f"value {i}": value.detach().float() for i, value in enumerate(values)}


def objective_on_mesh(rank: int, workers: int, recipe: Recipe, kind: str) -> dict[str, torch.Tensor]:
    """The same on a mesh, a row per microbatch."""
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    objective = make_objective(OTHERS[kind], weighted=True)
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world, objective=objective)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    each = ROWS // world.data.size
    batch = weighted_rows().rows(each * world.data.rank, each * (world.data.rank + 1))
    values = spread.passes(batch, scale_of(objective))
    results = gradients_of(spread)
    if world.axis("tensor").rank:
        values = torch.zeros_like(values)
    return results | {f"value {i}": value for i, value in enumerate(world.sum(values))}


REWARD = Reward(kind="reward", center=0.05)


def reward_model(recipe: Recipe) -> Recipe:
    update = {"model": recipe.model.model_copy(update={"reward": True}), "objective": REWARD}
    return recipe.model_copy(update=update)


def plain_reward(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The loss as in TRL's RewardTrainer, a document at a time and without packing, in float64."""
    model = empty_decoder(reward_model(recipe).model).double()
    init_weights(model, seed=0)
    batch, losses = rows(), []
    for row in range(ROWS):
        rewards = []
        for document in range(WIDTH):
            tokens = batch.inputs[row][batch.documents[row] == document]
            if batch.columns["weight"][row, document]:
                rewards.append((model.hidden(tokens[None])[0, -1] * model.score.weight[0]).sum())
        for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True):
            centered = REWARD.center * (chosen + rejected) ** 2
            losses.append(-torch.nn.functional.logsigmoid(chosen - rejected) + centered)
    assert len(losses) == PAIRS
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    return gradients | {"loss": loss.detach().float(), "steps": torch.ones(())}


def rewarded(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    recipe = reward_model(recipe)
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    objective = make_objective(REWARD)
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world, objective=objective)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    each = ROWS // world.data.size
    batch = rows().rows(each * world.data.rank, each * (world.data.rank + 1))
    batch = replace(batch, columns={"weight": batch.columns["weight"]})
    values = spread.passes(batch, SumScale((1 / PAIRS,) * len(objective.names), 1.0))
    results = gradients_of(spread)
    if world.axis("tensor").rank:
        values = torch.zeros_like(values)
    # a worker may have no element of the head, and still save how many updates it had
    optimizer = build_optimizer(spread.model, recipe.train, 0, world, ModelShare(world.rank, world.stage))
    set_step(optimizer.param_groups, 1, 1e-3)
    optimizer.step()
    steps = torch.stack([state["step"] for state in optimizer.state.values()]).min()
    return results | {"loss": world.sum(values)[0], "steps": steps}


POLICIES = {
    "entropy": PolicyGradient(
        kind="dapo", kl="k3", kl_weight=0.3, entropy=0.2, correction="mask", correction_limit=1.3, clip="cispo"
    ),
    "sequence": PolicyGradient(kind="gspo", clip_low=0.1, clip_high=0.1),
}
RL = Rl(rewards=("math",), temperature=0.7, max_tokens=8, updates=2)


def answers(recipe: Recipe) -> DeviceBatch:
    """Rows of answers, one of which is left out; log-probabilities that are near the model's."""
    batch, generator = rows(), torch.Generator().manual_seed(4)
    model = empty_decoder(recipe.model)
    init_weights(model, seed=0)
    with torch.no_grad():
        now = (model(batch.inputs, documents=batch.documents) / RL.temperature).log_softmax(-1)
    now = now.gather(2, batch.labels.clamp(min=0)[..., None])[..., 0]
    names = (BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS)
    columns = {name: now + 0.3 * torch.randn(now.shape, generator=generator) for name in names}
    columns |= {ADVANTAGE: torch.randn(now.shape, generator=generator), WEIGHT: batch.columns["weight"].clone()}
    columns[WEIGHT][1, 2] = 0
    return replace(batch, columns=columns)


def on_host(batch: DeviceBatch) -> Batch:
    columns = {name: column.numpy() for name, column in batch.columns.items()}
    labels = batch.labels.numpy()
    return Batch(batch.inputs.numpy(), labels, int((labels != -100).sum()), batch.documents.numpy(), columns)


def plain_policy(recipe: Recipe, kind: str) -> dict[str, torch.Tensor]:
    """The loss an answer at a time, with all logits, in float64."""
    batch = answers(recipe)
    model = empty_decoder(recipe.model).double()
    init_weights(model, seed=0)
    logprobs = (model(batch.inputs, documents=batch.documents) / RL.temperature).log_softmax(-1)
    losses, tokens = [], 0
    for row in range(ROWS):
        for document in range(WIDTH):
            here = (batch.documents[row] == document) & (batch.labels[row] != -100)
            if not batch.columns[WEIGHT][row, document]:
                continue
            current = logprobs[row][here, batch.labels[row][here]]
            behaviour, proximal, reference = (
                batch.columns[name][row][here].double() for name in (BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS)
            )
            advantage = batch.columns[ADVANTAGE][row][here].double()
            if kind == "sequence":
                ratio = ((current - proximal).sum() / len(current)).exp()
                losses.append(-torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean())
                continue
            factor = (proximal - behaviour).exp()
            factor = factor.where((factor < 1.3) & (factor > 1 / 1.3), 0.0)
            clipped = (current - proximal).exp().detach().clamp(0.8, 1.28)
            p = logprobs[row][here]
            losses.append((
                -clipped * advantage * current * factor
                + 0.3 * ((reference - current).exp() - (reference - current) - 1)
                + 0.2 * (p.exp() * p).sum(-1)
            ).sum())  # fmt: skip
            tokens += len(current)
    loss = torch.stack(losses).sum() / (len(losses) if kind == "sequence" else tokens)
    loss.backward()
    gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    return gradients | {"loss": loss.detach().float()}


def policy(rank: int, workers: int, recipe: Recipe, kind: str) -> dict[str, torch.Tensor]:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    objective, whole = make_objective(POLICIES[kind], rl=RL), answers(recipe)
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world, objective=objective)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    each = ROWS // world.data.size
    batch = whole.rows(each * world.data.rank, each * (world.data.rank + 1))
    batch = replace(batch, columns={name: batch.columns[name] for name in objective.columns})
    scale = SumScale(tuple(1 / count for count in objective.counts(on_host(whole))), 1.0)
    values = spread.passes(batch, scale)
    parameters = dict(spread.model.named_parameters())
    finish_gradients(parameters, spread.missing)
    results = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        results[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    if world.axis("tensor").rank:
        values = torch.zeros_like(values)
    return results | {"loss": world.sum(values)[: objective.terms].sum()}


class SumOfColumn:
    """Returns a column as it arrives at the objective."""

    names = ("loss",)
    terms = 1

    def measure(self, logprobs_BL: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        return batch.columns["reference"].float().sum().reshape(1) + 0 * logprobs_BL.sum()


def column(rank: int, workers: int, recipe: Recipe) -> torch.Tensor:
    """A column's sum through a sharded model in bfloat16."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": "bfloat16"})})
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world, objective=SumOfColumn())
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    with torch.no_grad():
        return spread.evaluate(rows())


def stories(rank: int, workers: int, recipes: dict[str, Recipe]) -> dict[str, torch.Tensor]:
    results = {}
    for name, recipe in recipes.items():
        results |= {f"{name}|{key}": value for key, value in story(rank, workers, recipe).items()}
        results |= {f"distill {name}|{key}": value for key, value in distillation(rank, workers, recipe).items()}
        if name == "shard 2":
            results["column"] = column(rank, workers, recipe)
        results |= {f"reward {name}|{key}": value for key, value in rewarded(rank, workers, recipe).items()}
        for kind in POLICIES:
            results |= {f"{kind} {name}|{key}": value for key, value in policy(rank, workers, recipe, kind).items()}
        for kind in OTHERS:
            found = objective_on_mesh(rank, workers, recipe, kind)
            results |= {f"{kind} {name}|{key}": value for key, value in found.items()}
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    recipes = {name: make_recipe(mesh) for name, mesh in MESHES.items()}
    return run_ranks(tmp_path_factory.mktemp("meshes"), 2, stories, recipes)


@pytest.mark.parametrize("mesh", MESHES)
def test_sums_gradients_and_scores_equal_plain_pytorch(mesh: str, ranks) -> None:
    truth = plain(make_recipe(MESHES[mesh]))
    seen = set()
    for results in ranks:
        for key, value in results.items():
            name = key.removeprefix(f"{mesh}|")
            if name == key:
                continue
            seen.add(name.partition(" ")[0])
            expected = truth[name.partition(" ")[0]]
            if name.startswith("scores"):
                first = int(name.split()[1])
                expected = expected[first : first + len(value)]
            torch.testing.assert_close(
                value, expected, rtol=2e-4, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert seen == truth.keys()


STEPS = [
    ("distill", plain_distillation),
    ("reward", plain_reward),
    *((kind, partial(plain_objective, kind=kind)) for kind in OTHERS),
    *((kind, partial(plain_policy, kind=kind)) for kind in POLICIES),
]


@pytest.mark.parametrize(("kind", "plain_step"), STEPS, ids=[kind for kind, _ in STEPS])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_gives_the_loss_and_gradients_of_the_definition(mesh: str, kind: str, plain_step, ranks) -> None:
    truth = plain_step(make_recipe(MESHES[mesh]))
    seen = set()
    for results in ranks:
        for key, value in results.items():
            name = key.removeprefix(f"{kind} {mesh}|")
            if name != key:
                seen.add(name)
                torch.testing.assert_close(
                    value, truth[name], rtol=5e-4, atol=5e-6, msg=lambda text, key=key: f"{key}: {text}"
                )
    assert seen == truth.keys()


def test_columns_keep_their_precision_where_weights_are_bfloat16(ranks) -> None:
    """Rounded to bfloat16, a reference of -123.4 would be off by a quarter."""
    for results in ranks:
        torch.testing.assert_close(results["column"], rows().columns["reference"].sum().reshape(1), rtol=0, atol=1e-5)


def test_rows_that_vary_fill_whole_microbatches_where_shapes_are_compiled() -> None:
    recipe = make_recipe({}).model_copy(update={"train": make_recipe({}).train.model_copy(update={"microbatch": 2})})
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, World(0, 1, torch.device("cpu")))
    assert spread.rows_multiple == 1
    assert replace(spread, one_shape=True).rows_multiple == 2
