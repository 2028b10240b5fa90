"""Policy losses and gradients of all weights against TRL's GRPOTrainer and RLOOTrainer, on the same tokens.

TRL pads each answer to a row of its own; Headway's rows have several. What differs by definition is in docs/rl.md, and
the cases below name it where they have to translate.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.data.loader import Batch
from headway.models import empty_decoder, init_weights, stored_weights, write_folder
from headway.parallel import World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale, loss_of
from headway.recipe import Model
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill
from headway.train.objectives import make_objective
from headway.train.objectives.policy import ADVANTAGE, BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS, WEIGHT
from headway.train.optim import widen_gradients
from own_environment import python_with

pytestmark = pytest.mark.slow
MODEL = Model(layers=2, dim=32, heads=4, kv_heads=2, hidden=48, vocab_size=97, tie_embeddings=False)
TEMPERATURE, MAX_TOKENS, COUNT = 0.9, 12, 6
OLD_NAMES = (BEHAVIOUR, PROXIMAL, "reference")


def case(ours: dict, trainer: str = "grpo", more: dict | None = None, **theirs) -> dict:
    """What Headway's recipe says, and TRL's settings."""
    return {"objective": ours, "trainer": trainer, "config": theirs, **(more or {})}


CORRECTION = {"correction": "truncate", "correction_limit": 1.2}
CASES = {
    "grpo": case({"kind": "grpo"}, loss_type="grpo"),
    "grpo-kl": case(
        {"kind": "grpo", "kl": "k3", "kl_weight": 0.3}, loss_type="grpo", beta=0.3, use_bias_correction_kl=False
    ),
    "dr-grpo": case({"kind": "dr-grpo"}, loss_type="dr_grpo"),
    "dapo": case({"kind": "dapo"}, loss_type="dapo", epsilon_high=0.28),
    "bnpo": case({"kind": "dapo"}, loss_type="bnpo", epsilon_high=0.28),
    "gspo": case(
        {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.08}, loss_type="grpo", importance_sampling_level="sequence",
        epsilon=0.05, epsilon_high=0.08,
    ),
    "cispo": case({"kind": "cispo", "clip_high": 0.1}, loss_type="cispo", epsilon_high=1.1),  # a bound, not an excess
    "entropy": case({"kind": "dapo", "entropy": 0.2}, loss_type="dapo", epsilon_high=0.28, entropy_coef=0.2),
    "truncate": case({"kind": "grpo", **CORRECTION}, more={"correction": "truncate", "limit": 1.2}, loss_type="grpo"),
    "mask": case(
        {"kind": "dr-grpo", **CORRECTION, "correction": "mask"}, more={"correction": "mask", "limit": 1.2},
        loss_type="dr_grpo",
    ),
    "first-update": case({"kind": "grpo"}, more={"old": False}, loss_type="grpo"),
    # TRL's ratio is of a whole answer, ours of each token: compared where both are 1.
    "rloo": case({"kind": "rloo"}, trainer="rloo", more={"on_policy": True}, epsilon=1e6),
}  # fmt: skip


def scored(work: Path, answers: list[dict]) -> None:
    """Give answers log-probabilities near the model's, as float32 has them."""
    rng = np.random.default_rng(7)
    decoder = empty_decoder(MODEL)
    decoder.load_state_dict(stored_weights(work / "model", MODEL))
    for answer in answers:
        ids = torch.tensor([answer["prompt"] + answer["tokens"]])
        with torch.no_grad():
            logprobs = (decoder(ids)[0] / TEMPERATURE).log_softmax(-1)
        first = len(answer["prompt"]) - 1
        now = logprobs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0].double().numpy()
        answer["now"] = now.astype(np.float32).tolist()
        for name in OLD_NAMES:
            answer[name] = (now + rng.normal(0, 0.2, len(now))).astype(np.float32).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, answers, and what TRL computed of all cases."""
    work, rng = tmp_path_factory.mktemp("trl"), np.random.default_rng(0)
    decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=3)
    with torch.no_grad():  # larger than initial ones, so that log-probabilities differ
        for parameter in decoder.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    write_folder(work / "model", MODEL, decoder.state_dict(), seq=64)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(1, MODEL.vocab_size, int(rng.integers(low, high))).tolist()

    answers = [{"prompt": ids(2, 7), "tokens": ids(1, MAX_TOKENS), "present": True} for _ in range(COUNT)]
    for answer, advantage in zip(answers, rng.normal(size=COUNT).astype(np.float32).tolist(), strict=True):
        answer["advantage"] = advantage
    scored(work, answers)
    content = {"cases": CASES, "answers": answers, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
    (work / "work.json").write_text(json.dumps(content))
    script = Path(__file__).with_name("trl_policy_losses.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hub"), "TQDM_DISABLE": "1"}
    command = [str(python_with("trl==1.16.0")), str(script), str(work)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return work


def packed(answers: list[dict], seq: int, rows_of: list[list[int]], on_policy: bool) -> Batch:
    """Rows of prompts with answers; `rows_of` names the answers of each row."""
    width, shape = max(map(len, rows_of)) + 1, (len(rows_of), seq)
    inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, -100)
    numbers = np.zeros(shape, dtype=np.int32)
    by_token = (ADVANTAGE, BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS)
    columns = {name: np.zeros(shape, dtype=np.float32) for name in by_token}
    columns[WEIGHT] = np.zeros((len(rows_of), width), dtype=np.float32)
    for row, members in enumerate(rows_of):
        place = 0
        for number, index in enumerate(members):
            answer = answers[index]
            ids = answer["prompt"] + answer["tokens"]
            span = slice(place + len(answer["prompt"]) - 1, place + len(ids) - 1)
            inputs[row, place : place + len(ids)], labels[row, span] = ids, answer["tokens"]
            numbers[row, place:] = number
            columns[WEIGHT][row, number], columns[ADVANTAGE][row, span] = 1, answer["advantage"]
            for column, name in zip((BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS), OLD_NAMES, strict=True):
                columns[column][row, span] = answer["now" if on_policy else name]
            place += len(ids)
        numbers[row, place:] = len(members)
    return Batch(inputs, labels, int((labels != -100).sum()), numbers, columns)


def measured(folder: Path, content: dict, batch: Batch, microbatch: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step and the gradients of all weights, by the trainer's passes."""
    recipe = parse_recipe(
        {
            "model": MODEL.model_dump(exclude_defaults=True),
            "data": {"path": "none", "seq": batch.inputs.shape[1]},
            "train": {"batch": len(batch.inputs), "microbatch": microbatch},
            "objective": content["objective"],
            "rl": {"rewards": ["math"], "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS,
                   "updates": 2 if content.get("old", True) else 1},
        }, {}, "test",
    )  # fmt: skip
    objective = make_objective(recipe.objective, rl=recipe.rl)
    world = World(0, 1, torch.device("cpu"))
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world, (), objective)
    if spread.accumulates:
        widen_gradients(spread.model)
    weights = stored_weights(folder / "model", MODEL)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, weights[name])
    inputs, labels, numbers = (torch.from_numpy(x) for x in (batch.inputs, batch.labels, batch.documents))
    columns = {name: torch.from_numpy(batch.columns[name]) for name in objective.columns}
    scale = SumScale(tuple(1 / count for count in objective.counts(batch)), 1 / batch.trained)
    values = spread.passes(DeviceBatch(inputs, labels, numbers, columns), scale)
    gradients = {name: parameter.grad for name, parameter in spread.model.named_parameters()}
    return float(loss_of(values, spread.terms)), gradients


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_trl(folder, name):
    content, answers = CASES[name], json.loads((folder / "work.json").read_text())["answers"]
    theirs = json.loads((folder / "losses.json").read_text())[name]
    slopes = stored_weights(folder / name, MODEL)
    for seq, rows in ((128, [list(range(COUNT))]), (64, [[0, 2, 4], [1, 3, 5]]), (48, [[4, 1], [0], [5, 2], [3]])):
        batch = packed(answers, seq, rows, content.get("on_policy", False))
        for microbatch in sorted({1, len(rows)}):
            loss, gradients = measured(folder, content, batch, microbatch)
            if name != "rloo":  # a sum over tokens of what TRL counts once, with the same gradient
                assert loss == pytest.approx(theirs, rel=1e-5, abs=1e-6)
            assert gradients.keys() == slopes.keys()
            for key, gradient in gradients.items():
                size = float(slopes[key].abs().max())
                assert size > 0, key
                torch.testing.assert_close(gradient, slopes[key], rtol=0, atol=1e-5 * size, msg=f"{key} of {name}")
