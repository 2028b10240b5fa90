"""Reward models: the loss against float64, folders that transformers opens, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headway.data.loader import Batch
from headway.errors import HeadwayError, ModelError
from headway.inference.load import load_folder
from headway.models import empty_decoder, init_weights, read_weights, write_folder
from headway.models.custom import empty_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Model, Recipe
from headway.recipe.huggingface import read_model
from headway.recipe.load import parse_recipe
from headway.recipe.objective import Reward
from headway.state.tensors import ModelShare
from headway.train.draw_weights import draw_weights
from headway.train.objectives import make_objective
from lazy_imports import transformers

VOCABULARY, SEQ, WIDTH = 41, 12, 4
SHAPE = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": VOCABULARY}


def pairs(seed: int) -> tuple[Batch, list[list[int]]]:
    """Rows of pairs, and the last position of each document."""
    rng = np.random.default_rng(seed)
    documents, lasts = np.zeros((3, SEQ), dtype=np.int32), []
    weight = np.zeros((3, WIDTH), dtype=np.float32)
    for row, count in enumerate((4, 2, 4)):
        edges = np.sort(rng.choice(np.arange(1, SEQ), count, replace=False))  # the end of the last is padding's begin
        for number, edge in enumerate(edges):
            documents[row, edge:] = number + 1
        lasts.append([int(edge) - 1 for edge in edges])
        weight[row, :count] = np.repeat(rng.choice([0.5, 1.0, 2.0], count // 2), 2)
    labels = np.full((3, SEQ), -100)
    return Batch(labels, labels, 0, documents, {"weight": weight}), lasts


@pytest.mark.parametrize("center", [0.0, 0.1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_trls_formula_on_the_last_tokens(seed, center):
    host, lasts = pairs(seed)
    objective = make_objective(Reward(kind="reward", center=center))
    rewards = torch.tensor(np.random.default_rng(seed).normal(0, 2, (3, SEQ)))
    own, true = rewards.float().requires_grad_(), rewards.clone().requires_grad_()
    batch = DeviceBatch(
        *(torch.from_numpy(x) for x in (host.inputs, host.labels, host.documents)),
        {"weight": torch.from_numpy(host.columns["weight"])},
    )
    values = SumScale(tuple(1 / count for count in objective.counts(host)), 1.0).of(objective.measure(own, batch))
    total = count = right = 0.0
    for row, ends in enumerate(lasts):
        for chosen in range(0, len(ends), 2):
            weight = float(host.columns["weight"][row, chosen])
            good, bad = true[row, ends[chosen]], true[row, ends[chosen + 1]]
            total = total + weight * (-torch.sigmoid(good - bad).log() + center * (good + bad) ** 2)
            right += weight * float(good > bad)
            count += weight
    loss = total / count
    assert float(values[0].detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(values[1].detach()) == pytest.approx(right / count)
    (gradient,), (slope,) = torch.autograd.grad(values[0], own), torch.autograd.grad(loss, true)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-7)


def test_no_split_of_rows_changes_sums():
    host, _ = pairs(3)
    objective, rewards = make_objective(Reward(kind="reward")), torch.randn(3, SEQ)
    batch = DeviceBatch(
        *(torch.from_numpy(x) for x in (host.inputs, host.labels, host.documents)),
        {"weight": torch.from_numpy(host.columns["weight"])},
    )
    parts = [objective.measure(rewards[low:high], batch.rows(low, high)) for low, high in ((0, 1), (1, 3))]
    torch.testing.assert_close(sum(parts), objective.measure(rewards, batch))


FAMILIES = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "qwen3": {"qk_norm": True},
    "gemma2": {"family": "gemma2"},
    "gpt2": {"family": "gpt2", "kv_heads": 4},
}


@pytest.mark.parametrize("settings", FAMILIES.values(), ids=FAMILIES)
def test_transformers_gives_an_exported_reward_model_the_same_scores(settings, tmp_path):
    model = Model(**{**SHAPE, **settings, "reward": True})
    decoder = empty_decoder(model)
    init_weights(decoder, seed=2)
    with torch.no_grad():
        decoder.score.weight.mul_(20)
    write_folder(tmp_path / "folder", model, decoder.state_dict())
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "folder", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        rewards = decoder(tokens)[:, -1]
        scores = torch.cat([theirs.eval()(row[None]).logits for row in tokens])
    assert scores.shape == (3, 1)
    torch.testing.assert_close(rewards, scores[:, 0], rtol=1e-5, atol=1e-5)
    assert float(rewards.std()) > 1e-3
    again = read_model(tmp_path / "folder")
    assert again.reward
    assert read_weights(tmp_path / "folder").keys() == decoder.state_dict().keys()


def make_recipe(**changes) -> Recipe:
    values = {"model": SHAPE, "objective": {"kind": "reward"}, "data": {"path": "nowhere"}, "seed": 4}
    return parse_recipe(values | changes, {}, "test")


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_starts_from_a_language_models_stream_and_the_seeds_head(tied, tmp_path):
    base = Model(**SHAPE, tie_embeddings=tied)
    decoder = empty_decoder(base)
    init_weights(decoder, seed=9)
    write_folder(tmp_path / "base", base, decoder.state_dict())
    scores = []
    for seed in (4, 4, 5):
        recipe = make_recipe(model=SHAPE | {"init": str(tmp_path / "base"), "tie_embeddings": tied}, seed=seed)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"reward": True})})
        model = empty_model(recipe.model).to_empty(device="cpu")
        names = frozenset(model.state_dict())
        draw_weights(model, recipe, ModelShare(0, (0,), {}, names, frozenset()), None)
        for name, weight in model.state_dict().items():
            if name != "score.weight":
                assert torch.equal(weight, decoder.state_dict()[name]), name
        scores.append(model.score.weight.detach().clone())
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])
    assert 0.01 < float(scores[0].std()) < 0.03


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"rank": 4}, "model": SHAPE | {"init": "x"}}, "leave .lora. out"),
        ({"model": {"class": "a.b:C"}}, "needs one of Headway's decoders"),
        ({"objective": {"kind": "sft"}, "model": SHAPE | {"reward": True}}, "model.reward needs objective.kind"),
    ],
)
def test_what_a_reward_model_excludes_is_refused(changes, message):
    with pytest.raises(HeadwayError, match=message):
        make_recipe(**changes)


def test_a_reward_model_is_not_served(tmp_path: Path):
    model = Model(**SHAPE, reward=True)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=2)
    write_folder(tmp_path / "folder", model, decoder.state_dict())
    with pytest.raises(ModelError, match="is a reward model") as raised:
        load_folder(tmp_path / "folder")
    assert raised.value.usage
