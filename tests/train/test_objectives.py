"""Objectives against float64 references written from the papers, on packed rows of several documents."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from headway.data.loader import Batch
from headway.errors import DataError, ModelError
from headway.parallel import World
from headway.parallel.objective import DeviceBatch, SumScale, by_document, loss_of
from headway.recipe import Recipe
from headway.recipe.objective import CustomObjective, Dpo, Kto, Orpo, Pretrain, Sft, SimPo
from headway.train.evaluate import held_out_loss
from headway.train.feed import on_device
from headway.train.loop import global_counts
from headway.train.objectives import make_objective
from headway.train.objectives.base import labels_per_document
from headway.train.objectives.reference import ScoringProgress, column_file
from headway.train.stop import StoppedEarly, StopRequest

SEQ, WIDTH = 40, 6
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def packed(seed: int, rows: int = 3) -> SimpleNamespace:
    """Random rows of documents with prompts, padding at the end, log-probabilities and columns."""
    rng = np.random.default_rng(seed)
    documents = np.zeros((rows, SEQ), dtype=np.int32)
    labels = np.full((rows, SEQ), -100)
    spans: list[list[tuple[int, int]]] = []
    for row in range(rows):
        place, spans_of_row = 0, []
        for number in range(2 * int(rng.integers(1, WIDTH // 2 + 1))):
            prompt, answer = (int(n) for n in rng.integers(1, 4, 2))
            documents[row, place:] = number
            spans_of_row.append((place + prompt - 1, place + prompt - 1 + answer))
            labels[row, slice(*spans_of_row[-1])] = rng.integers(0, 50, answer)
            place += prompt + answer
        documents[row, place:] = len(spans_of_row)
        spans.append(spans_of_row)
    weight = np.zeros((rows, WIDTH), dtype=np.float32)
    for row, spans_of_row in enumerate(spans):
        weight[row, : len(spans_of_row)] = np.repeat(rng.choice([0.5, 1.0, 2.0], len(spans_of_row) // 2), 2)
    columns = {
        "weight": weight,
        "reference": (rng.normal(-5, 1, (rows, WIDTH)) * (weight > 0)).astype(np.float32),
        "desirable": np.repeat(rng.integers(0, 2, (rows, WIDTH // 2)), 2, axis=1).astype(np.float32),
    }
    logprobs = np.where(labels == -100, 0, -rng.exponential(1.0, labels.shape))
    host = Batch(labels, labels, int((labels != -100).sum()), documents, columns)
    return SimpleNamespace(host=host, logprobs=logprobs, spans=spans, columns=columns)


def measured(objective, data) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values of a step, the loss and its gradient over the log-probabilities."""
    logprobs = torch.tensor(data.logprobs, dtype=torch.float32, requires_grad=True)
    host = data.host
    columns = {name: torch.from_numpy(host.columns[name]) for name in objective.columns}
    batch = DeviceBatch(
        torch.from_numpy(host.inputs), torch.from_numpy(host.labels), torch.from_numpy(host.documents), columns
    )
    scale = SumScale(tuple(1 / (count or 1) for count in objective.counts(host)), 1.0)
    values = scale.of(objective.measure(logprobs, batch))
    loss = loss_of(values, objective.terms)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # Those of masked labels are constants: `token_logprobs` has no gradient there.
    return values.detach(), loss.detach(), gradient.where(batch.labels != -100, 0.0)


def pairs_of(data, logprobs):
    """Yield weight, sums, lengths and reference sums of each pair, in float64."""
    for row, spans in enumerate(data.spans):
        for chosen in range(0, len(spans), 2):
            sums = [logprobs[row, slice(*spans[d])].sum() for d in (chosen, chosen + 1)]
            lengths = [spans[d][1] - spans[d][0] for d in (chosen, chosen + 1)]
            reference = [float(data.columns["reference"][row, d]) for d in (chosen, chosen + 1)]
            yield float(data.columns["weight"][row, chosen]), sums, lengths, reference


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def dpo(recipe):
    def pair(sums, lengths, reference):
        chosen, rejected = (s - (0 if recipe.reference_free else r) for s, r in zip(sums, reference, strict=True))
        if recipe.loss == "ipo":
            return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * recipe.beta)) ** 2
        margin = recipe.beta * (chosen - rejected)
        if recipe.loss == "hinge":
            return torch.clamp(1 - margin, min=0)
        return -(1 - recipe.smoothing) * sigmoid(margin).log() - recipe.smoothing * sigmoid(-margin).log()

    return pair


def simpo(recipe):
    return lambda sums, lengths, _: (
        -(sigmoid(recipe.beta * (sums[0] / lengths[0] - sums[1] / lengths[1]) - recipe.margin).log())
    )


RECIPES = [
    (Dpo(kind="dpo"), dpo),
    (Dpo(kind="dpo", beta=0.5, smoothing=0.2), dpo),
    (Dpo(kind="dpo", loss="hinge"), dpo),
    (Dpo(kind="dpo", loss="ipo", beta=0.3), dpo),
    (Dpo(kind="dpo", reference_free=True), dpo),
    (SimPo(kind="simpo", margin=0.7), simpo),
]


@pytest.mark.parametrize(("recipe", "reference"), RECIPES, ids=lambda value: str(getattr(value, "kind", "")))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pair_losses_equal_the_papers_formulas(recipe, reference, seed):
    data = packed(seed)
    _, loss, gradient = measured(make_objective(recipe), data)
    logprobs = torch.tensor(data.logprobs, dtype=torch.float64, requires_grad=True)
    weights, losses = [], []
    for weight, sums, lengths, columns in pairs_of(data, logprobs):
        weights.append(weight)
        losses.append(weight * reference(recipe)(sums, lengths, columns))
    true = torch.stack(losses).sum() / sum(weights)
    (slope,) = torch.autograd.grad(true, logprobs)
    torch.testing.assert_close(loss.double(), true.detach(), **EXACT)
    torch.testing.assert_close(gradient.double(), slope, **EXACT)


@pytest.mark.parametrize("seed", [0, 1])
def test_orpo_is_cross_entropy_and_odds_ratio(seed):
    recipe, data = Orpo(kind="orpo", beta=0.4), packed(seed)
    values, loss, gradient = measured(make_objective(recipe), data)
    logprobs = torch.tensor(data.logprobs, dtype=torch.float64, requires_grad=True)
    nll = tokens = odds = count = 0.0
    for weight, sums, lengths, _ in pairs_of(data, logprobs):
        p, q = (torch.exp(s / n) for s, n in zip(sums, lengths, strict=True))
        nll, tokens = nll - weight * sums[0], tokens + weight * lengths[0]
        odds = odds - weight * recipe.beta * sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q))).log()
        count += weight
    true = nll / tokens + odds / count
    (slope,) = torch.autograd.grad(true, logprobs)
    torch.testing.assert_close(loss.double(), true.detach(), **EXACT)
    torch.testing.assert_close(gradient.double(), slope, **EXACT)
    torch.testing.assert_close(values[0].double(), (nll / tokens).detach(), **EXACT)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_kto_equals_the_papers_formula(seed):
    recipe, data = Kto(kind="kto", beta=0.3, undesirable_weight=1.5), packed(seed)
    _, loss, gradient = measured(make_objective(recipe), data)
    logprobs = torch.tensor(data.logprobs, dtype=torch.float64, requires_grad=True)
    losses, weights = [], []
    for row, spans in enumerate(data.spans):
        ratios = [
            logprobs[row, slice(*span)].sum() - float(data.columns["reference"][row, d]) for d, span in enumerate(spans)
        ]
        z = max(0.0, float(sum(ratios[1::2]).detach()) / len(ratios[1::2]))
        for d in range(0, len(spans), 2):
            weight, good = float(data.columns["weight"][row, d]), bool(data.columns["desirable"][row, d])
            value = sigmoid(recipe.beta * (ratios[d] - z)) if good else sigmoid(recipe.beta * (z - ratios[d]))
            losses.append(weight * (1.0 if good else 1.5) * (1 - value))
            weights.append(weight)
    true = torch.stack(losses).sum() / sum(weights)
    (slope,) = torch.autograd.grad(true, logprobs)
    torch.testing.assert_close(loss.double(), true.detach(), **EXACT)
    torch.testing.assert_close(gradient.double(), slope, **EXACT)


def test_weighted_fine_tuning_is_a_weighted_mean_of_tokens():
    data = packed(4)
    _, loss, _ = measured(make_objective(Sft(kind="sft"), weighted=True), data)
    total = count = 0.0
    for row, spans in enumerate(data.spans):
        for document, span in enumerate(spans):
            weight = float(data.columns["weight"][row, document])
            total -= weight * data.logprobs[row, slice(*span)].sum()
            count += weight * (span[1] - span[0])
    assert float(loss) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("recipe", [recipe for recipe, _ in RECIPES] + [Orpo(kind="orpo"), Kto(kind="kto")])
def test_no_split_of_rows_changes_sums_or_counts(recipe):
    objective, data = make_objective(recipe), packed(5, rows=4)
    logprobs = torch.tensor(data.logprobs, dtype=torch.float64)
    columns = {name: torch.from_numpy(data.host.columns[name]).double() for name in objective.columns}
    whole = DeviceBatch(
        *(torch.from_numpy(x) for x in (data.host.inputs, data.host.labels, data.host.documents)), columns
    )
    parts = [objective.measure(logprobs[low:high], whole.rows(low, high)) for low, high in ((0, 1), (1, 4))]
    torch.testing.assert_close(sum(parts), objective.measure(logprobs, whole))
    host = data.host
    counts = [
        objective.counts(
            Batch(
                host.inputs[low:high],
                host.labels[low:high],
                int((host.labels[low:high] != -100).sum()),
                host.documents[low:high],
                {name: column[low:high] for name, column in host.columns.items()},
            )
        )
        for low, high in ((0, 1), (1, 4))
    ]
    assert np.allclose(np.sum(counts, axis=0), objective.counts(host))


def test_metrics_are_accuracy_and_rewards_of_pairs():
    data = packed(6)
    recipe = Dpo(kind="dpo", beta=0.2)
    objective = make_objective(recipe)
    values, *_ = measured(objective, data)
    named = dict(zip(objective.names, values.tolist(), strict=True))
    rows = list(pairs_of(data, data.logprobs))
    total = sum(weight for weight, *_ in rows)
    rewards = [[recipe.beta * (s - r) for s, r in zip(sums, reference, strict=True)] for _, sums, _, reference in rows]
    right = sum(weight for (weight, *_), (chosen, rejected) in zip(rows, rewards, strict=True) if chosen > rejected)
    margin = sum(weight * (chosen - rejected) for (weight, *_), (chosen, rejected) in zip(rows, rewards, strict=True))
    assert named["accuracy"] == pytest.approx(right / total)
    assert named["margin"] == pytest.approx(margin / total, rel=1e-4)
    assert named["margin"] == pytest.approx(named["chosen"] - named["rejected"], rel=1e-4)


def test_documents_are_summed_without_padding():
    data = packed(7)
    sums = by_document(torch.tensor(data.logprobs), torch.from_numpy(data.host.documents), WIDTH)
    counted = labels_per_document(data.host)
    for row, spans in enumerate(data.spans):
        for document in range(WIDTH):
            span = spans[document] if document < len(spans) else (0, 0)
            assert float(sums[row, document]) == pytest.approx(data.logprobs[row, slice(*span)].sum())
            assert counted[row, document] == span[1] - span[0]


def test_a_certain_answer_has_finite_odds():
    """An answer with probability 1 in float32 gives a finite loss and gradient."""
    data = packed(8)
    data.logprobs[:] = 0
    _, loss, gradient = measured(make_objective(Orpo(kind="orpo")), data)
    assert math.isfinite(float(loss))
    assert torch.isfinite(gradient).all()


def test_the_class_of_the_guide_is_the_mean_over_labels(tmp_path, monkeypatch):
    """What docs/post-training.md shows is found by its name, and measures the cross-entropy of labels."""
    guide = (Path(__file__).parents[2] / "docs" / "post-training.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "guide_losses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    section = {"kind": "custom", "class": "guide_losses:MeanAnswerLoss"}
    objective, data = make_objective(CustomObjective.model_validate(section)), packed(9)
    values, loss, _ = measured(objective, data)
    assert float(loss) == pytest.approx(-data.logprobs.sum() / data.host.trained, rel=1e-5)
    assert values.tolist()[1] == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"class": "nowhere_at_all:Loss"}, "objective.class: no module nowhere_at_all"),
        ({"class": "collections:Countr"}, "objective.class names collections:Countr"),
        ({"class": "collections:Counter"}, "collections:Counter has no names"),
        ({"class": "fractions:Fraction", "args": {"unknown": 1}}, "cannot be built with objective.args"),
    ],
)
def test_a_wrong_class_is_one_sentence(section, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        make_objective(CustomObjective.model_validate({"kind": "custom", **section}))


class TwoMeans:
    """An objective of text: two sums with different counts."""

    names = ("loss", "rows")
    terms = 1
    columns = frozenset()

    def counts(self, batch):
        return batch.trained, len(batch.labels)

    def measure(self, logprobs_BL, batch):
        return torch.stack((-logprobs_BL.sum(), logprobs_BL.new_tensor(float(len(batch.labels)))))


@pytest.mark.parametrize("masks", [True, False])
def test_each_sum_has_its_own_count_also_where_no_label_is_masked(masks):
    world = SimpleNamespace(size=2, data=SimpleNamespace(size=2), sum=lambda counts: 2 * counts)
    feed, recipe = SimpleNamespace(masks=masks), SimpleNamespace(data=SimpleNamespace(seq=10))
    parts = SimpleNamespace(world=world, feed=feed, recipe=recipe, objective=TwoMeans())
    counts = global_counts(parts, 8, 40, (40.0, 4.0))
    assert (counts.sums, counts.trained) == ((80.0, 8.0), 80)
    parts.objective = make_objective(Pretrain())
    assert global_counts(parts, 8, 40, (40.0,)) == ((80.0,), 80)


def test_a_held_out_loss_is_a_mean_also_of_small_weights():
    parts = SimpleNamespace(objective=SimpleNamespace(terms=2))
    totals = torch.tensor([[0.5, 3.0, 7.0], [0.25, 0.0, 1.0]], dtype=torch.float64)
    assert held_out_loss(parts, totals) == 5.0  # 0.5 / 0.25, and 3 over nothing; the third is no term


def test_a_column_that_the_data_does_not_have_is_named():
    with pytest.raises(DataError, match="needs 'weight' of each sample"):
        on_device({}, {"weight"}, torch.device("cpu"))


def test_reference_column_is_another_for_other_weights_or_precision(tmp_path):
    """A hit for another base, adapter or quantization would compare with the wrong reference."""

    def file_of(content: bytes, **recipe) -> str:
        init = tmp_path / content.decode()
        init.mkdir(exist_ok=True)
        (init / "model.safetensors").write_bytes(content)
        values = {"data": {"path": "d"}, "model": {"layers": 1, "init": str(init)}, "objective": {"kind": "dpo"}}
        dataset = SimpleNamespace(version="v", path=tmp_path)
        return column_file(Recipe.model_validate(values | recipe), SimpleNamespace(datasets=[dataset])).name

    lora = {"rank": 4}
    names = [
        file_of(b"a"),
        file_of(b"b"),
        file_of(b"a", data={"path": "d", "seq": 64}),
        file_of(b"a", train={"dtype": "bfloat16"}),
        file_of(b"a", lora=lora | {"quantize": "nf4"}),
    ]
    assert len(set(names)) == len(names)
    assert file_of(b"a", lora=lora) == file_of(b"a"), "adapters begin as zero: the base is the reference"
    assert file_of(b"a", train={"lr": 1e-5}) == file_of(b"a")


def test_scoring_stops_on_request_where_all_workers_agree() -> None:
    """Between two percents nothing is asked: workers would have to answer at different rows."""
    recorder, stop = Mock(), StopRequest()
    progress = ScoringProgress(World(0, 1, torch.device("cpu")), recorder, Mock(), stop, "reference")
    progress.mark(0, 20, 1000)
    assert recorder.event.call_args.kwargs == {"of": "reference", "done": 20, "total": 1000}
    stop.asked = True
    progress.mark(21, 25, 1000)
    with pytest.raises(StoppedEarly):
        progress.mark(25, 31, 1000)
