"""Losses and gradients of all weights against TRL's trainers, on the same tokens.

TRL pads each sequence to a row of its own; Headway's rows have several documents. TRL's definitions differ from
Headway's in two places, which docs/post-training.md names: ORPO's cross-entropy counts the prompt (compared with
prompts of one token, and with its odds ratio alone), and KTO's baseline is a mean over one worker's batch (here a row).
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
from headway.train.objectives import NextToken, make_objective
from headway.train.optim import widen_gradients
from own_environment import python_with

pytestmark = pytest.mark.slow
MODEL = Model(layers=2, dim=32, heads=4, kv_heads=2, hidden=48, vocab_size=97, tie_embeddings=False)


def units(kind: str, prompts: tuple[int, int] = (2, 9), count: int = 6, seed: int = 0) -> list[tuple]:
    """Random samples: (prompt, answer), (prompt, chosen, rejected, reference) or one with a label, too."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(1, MODEL.vocab_size, int(rng.integers(low, high))).tolist()

    drawn = []
    for number in range(count):
        unit = (ids(*prompts), *(ids(1, 12) for _ in range(1 if kind == "sft" else 2)))
        if kind != "sft":
            reference = [-len(answer) * 4.6 + float(rng.normal(0, 2)) for answer in unit[1:]]
            reference[1] -= 2 + number if kind == "kto" else 0  # KTO's baseline is above 0, and each batch has its own
            unit = (*unit, reference)
        drawn.append((*unit, number % 3 > 0) if kind == "kto" else unit)
    return drawn


def case(objective: dict, batches: list, **theirs) -> dict:
    """What Headway's recipe says, and what TRL is given."""
    return {"objective": objective, "batches": batches, "method": objective["kind"], **theirs}


KTO = {"kind": "kto", "beta": 0.3, "undesirable_weight": 1.5}
CASES = {
    "sft": case({"kind": "sft"}, [units("sft")], packing=False),
    "sft-packed": case({"kind": "sft"}, [units("sft", seed=1)], packing=True),
    "dpo": case({"kind": "dpo", "beta": 0.2}, [units("pairs")], loss="sigmoid", beta=0.2),
    "dpo-hinge": case({"kind": "dpo", "beta": 0.2, "loss": "hinge"}, [units("pairs")], loss="hinge", beta=0.2),
    "dpo-ipo": case({"kind": "dpo", "beta": 0.2, "loss": "ipo"}, [units("pairs")], loss="ipo", beta=0.2),
    "orpo": case({"kind": "orpo", "beta": 0.4}, [units("pairs", (1, 2))], beta=0.4, answers=False),
    "orpo-prompts": case({"kind": "orpo", "beta": 0.4}, [units("pairs")], beta=0.4, answers=True),
    "simpo": case({"kind": "simpo", "beta": 2.0, "margin": 0.7}, [units("pairs")], beta=2.0, margin=0.7),
    "kto": case(KTO, [units("kto")], beta=0.3, undesirable_weight=1.5),
    "kto-rows": case(KTO, [units("kto", count=4), units("kto", count=2, seed=1)], beta=0.3, undesirable_weight=1.5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and what TRL computed of all cases: losses.json and folders of gradients."""
    work = tmp_path_factory.mktemp("trl")
    decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=3)
    with torch.no_grad():  # larger than initial ones, so that log-probabilities differ
        for parameter in decoder.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    write_folder(work / "model", MODEL, decoder.state_dict(), seq=64)
    (work / "work.json").write_text(json.dumps(CASES))
    python = python_with("trl==1.16.0")
    script = Path(__file__).with_name("trl_losses.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hub"), "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [str(python), str(script), str(work)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return work


def documents(unit: tuple) -> list[tuple[list[int], list[int]]]:
    """The documents of a sample: prompt and answer, once or for each of two answers."""
    return [(unit[0], answer) for answer in unit[1 : 2 if len(unit) == 2 else 3]]


def packed(batches: list[list[tuple]], seq: int, rows_of: list[list[int]]) -> Batch:
    """Rows of documents: `rows_of` names the samples of each row."""
    samples = [unit for batch in batches for unit in batch]
    width = max(sum(len(documents(samples[index])) for index in row) for row in rows_of) + 1
    width += width % 2
    shape = (len(rows_of), seq)
    inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, -100)
    numbers = np.zeros(shape, dtype=np.int32)
    columns = {name: np.zeros((len(rows_of), width), dtype=np.float32) for name in ("weight", "reference", "desirable")}
    for row, members in enumerate(rows_of):
        place = number = 0
        for index in members:
            unit = samples[index]
            for part, (prompt, answer) in enumerate(documents(unit)):
                ids = prompt + answer
                inputs[row, place : place + len(ids)] = ids
                labels[row, place + len(prompt) - 1 : place + len(ids) - 1] = answer
                numbers[row, place:] = number
                columns["weight"][row, number] = 1
                columns["reference"][row, number] = unit[3][part] if len(unit) > 3 else 0
                columns["desirable"][row, number] = unit[4] if len(unit) > 4 else 0
                place, number = place + len(ids), number + 1
        numbers[row, place:] = number
        assert place <= seq
    return Batch(inputs, labels, int((labels != -100).sum()), numbers, columns)


def packings(content: dict) -> list[tuple[int, list[list[int]]]]:
    """(length, samples of each row): all in one row, and spread over several; KTO's rows are TRL's batches."""
    sizes = [len(batch) for batch in content["batches"]]
    indices = list(range(sum(sizes)))
    if content["method"] == "kto":
        rows = [indices[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))]
        return [(256, rows), (300, rows[::-1])]
    return [(256, [indices]), (128, [indices[::2], indices[1::2]]), (100, [[4, 1], [0], [5, 2], [3]])]


def measured(folder: Path, content: dict, batch: Batch, microbatch: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step and the gradients of all weights, by the trainer's passes."""
    train = {"batch": len(batch.inputs), "microbatch": microbatch}
    data = {"path": "none", "seq": batch.inputs.shape[1]}
    recipe = parse_recipe(
        {"model": MODEL.model_dump(exclude_defaults=True), "data": data, "train": train,
         "objective": content["objective"]}, {}, "test",
    )  # fmt: skip
    objective = make_objective(recipe.objective)
    head = None if isinstance(objective, NextToken) else objective
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, World(0, 1, torch.device("cpu")), (), head)
    if spread.accumulates:
        widen_gradients(spread.model)
    weights = stored_weights(folder / "model", MODEL)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, weights[name])
    inputs, labels, numbers = (torch.from_numpy(x) for x in (batch.inputs, batch.labels, batch.documents))
    columns = {name: torch.from_numpy(batch.columns[name]) for name in objective.columns}
    scale = SumScale(tuple(1 / (count or 1) for count in objective.counts(batch)), 1 / batch.trained)
    values = spread.passes(DeviceBatch(inputs, labels, numbers, columns), scale)
    gradients = {name: parameter.grad for name, parameter in spread.model.named_parameters()}
    return float(loss_of(values, spread.terms)), gradients


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_trl(folder, name):
    content = CASES[name]
    theirs = json.loads((folder / "losses.json").read_text())[name]
    slopes = stored_weights(folder / name, MODEL)
    for seq, rows in packings(content):
        batch = packed(content["batches"], seq, rows)
        for microbatch in sorted({1, len(rows)}):
            loss, gradients = measured(folder, content, batch, microbatch)
            assert loss == pytest.approx(theirs, rel=1e-5)
            assert gradients.keys() == slopes.keys()
            for key, gradient in gradients.items():
                size = float(slopes[key].abs().max())
                assert size > 0, key
                torch.testing.assert_close(gradient, slopes[key], rtol=0, atol=1e-5 * size, msg=f"{key} of {name}")


def test_steps_of_the_benchmark_have_the_losses_of_trl():
    """Four updates of AdamW from the same weights, by the parts of the trainer and by TRL's loop."""
    benchmark = Path(__file__).parents[2] / "benchmarks" / "post_training_gpu.py"
    command = [str(python_with("trl==1.16.0")), str(benchmark), "--tiny", "--device", "cpu", "--only", "sft", "dpo"]
    source = {"PYTHONPATH": str(benchmark.parents[1] / "src")}
    done = subprocess.run([*command, "--limit", "600", "--budget", "2000"], env={**os.environ, **source},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("relative difference") == 2
