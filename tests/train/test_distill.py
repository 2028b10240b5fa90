"""Distillation: its loss against float64 references from the definition, and the teacher's stored tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from chat_models import CHATML, byte_tokenizer, write_model_folder
from headway.agent.launch.resolve import resolve_recipe
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.corpus import open_corpus
from headway.data.loader import Batch
from headway.errors import HeadwayError
from headway.models import empty_decoder, init_weights, write_folder
from headway.models.huggingface import load_into
from headway.models.top_k import top_k_logprobs
from headway.parallel import World
from headway.parallel.objective import TEACHER_IDS, TEACHER_LOGPROBS, DeviceBatch, SumScale
from headway.recipe import Model, Recipe
from headway.recipe.objective import Distill
from headway.train.objectives import make_objective
from headway.train.objectives.teacher import WithTeacher, load_teacher, recipe_of_teacher, stored_targets

SEQ, VOCABULARY, WIDTH = 12, 19, 3


def packed(seed: int, count: int) -> tuple[Batch, DeviceBatch, torch.Tensor, torch.Tensor]:
    """Rows of documents with masked labels, weights and padding; logits of both models, in float64."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, VOCABULARY, (4, SEQ))
    labels[rng.random((4, SEQ)) < 0.4] = -100
    documents = np.minimum(np.arange(SEQ) // 4, WIDTH - 1)[None].repeat(4, axis=0).astype(np.int32)
    documents[-1, 8:] = WIDTH  # padding
    labels[-1, 8:] = -100
    weight = rng.choice([0.5, 1.0, 2.0], (4, WIDTH)).astype(np.float32)
    teacher, student = (torch.tensor(rng.normal(0, 2, (4, SEQ, VOCABULARY))) for _ in range(2))
    host = Batch(labels, labels, int((labels != -100).sum()), documents, {"weight": weight})
    return host, torch.from_numpy(labels), teacher, student


def true_loss(recipe: Distill, host: Batch, teacher: torch.Tensor, student: torch.Tensor, weighted: bool):
    p, q = ((logits / recipe.temperature).softmax(-1) for logits in (teacher, student))
    total = count = 0.0
    for row, place in np.argwhere(host.labels != -100).tolist():
        weight = float(host.columns["weight"][row, host.documents[row, place]]) if weighted else 1.0
        best = p[row, place].topk(recipe.top_k).indices
        a, b = p[row, place][best], q[row, place][best]
        if recipe.top_k < VOCABULARY:
            a, b = (torch.cat((x, 1 - x.sum().reshape(1))) for x in (a, b))
        kl = (a * (a / b).log()).sum() if recipe.divergence == "forward" else (b * (b / a).log()).sum()
        nll = -student[row, place].log_softmax(-1)[host.labels[row, place]]
        total = total + weight * ((1 - recipe.next_token) * recipe.temperature**2 * kl + recipe.next_token * nll)
        count += weight
    return total / count


def measured(recipe: Distill, host: Batch, teacher: torch.Tensor, student: torch.Tensor, weighted: bool, rows):
    """Return the loss through the objective, whose log-probabilities come from an identity as the head."""
    from headway.models.top_k import logprobs_among

    objective, identity = make_objective(recipe, weighted), torch.eye(VOCABULARY)
    counts = objective.counts(host)
    scale, total = SumScale(tuple(1 / count for count in counts), 1.0), 0.0
    for low, high in rows:
        labels = torch.from_numpy(host.labels[low:high])
        ids, logprobs = top_k_logprobs(
            teacher[low:high].float().flatten(0, 1), identity, recipe.top_k, recipe.temperature, None, 64
        )
        scores = logprobs_among(
            student[low:high].flatten(0, 1), identity, labels.flatten(), ids, recipe.temperature, None, 64
        ).view(*labels.shape, -1)
        columns = {TEACHER_LOGPROBS: logprobs.view(*labels.shape, -1)}
        columns |= {"weight": torch.from_numpy(host.columns["weight"][low:high])} if weighted else {}
        batch = DeviceBatch(labels, labels, torch.from_numpy(host.documents[low:high]), columns)
        total = total + scale.of(objective.measure(scores, batch))
    return total


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("top_k", "temperature", "next_token", "weighted"),
    [(4, 1.0, 0.0, False), (6, 2.0, 0.3, True), (VOCABULARY, 0.7, 0.0, True)],
)
def test_loss_and_gradient_equal_the_definition_however_rows_are_split(
    divergence, top_k, temperature, next_token, weighted
):
    recipe = Distill(
        kind="distill", teacher="t", top_k=top_k, temperature=temperature, divergence=divergence, next_token=next_token
    )
    host, _, teacher, student = packed(7, top_k)
    true_student = student.clone().requires_grad_()
    true = true_loss(recipe, host, teacher, true_student, weighted)
    (slope,) = torch.autograd.grad(true, true_student)
    for rows in ([(0, 4)], [(0, 1), (1, 3), (3, 4)]):
        own = student.float().requires_grad_()
        values = measured(recipe, host, teacher, own, weighted, rows)
        (gradient,) = torch.autograd.grad(values[0], own)
        assert float(values[0].detach()) == pytest.approx(float(true.detach()), rel=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-6)


def test_a_student_that_is_its_own_teacher_has_no_divergence():
    for divergence in ("forward", "reverse"):
        recipe = Distill(kind="distill", teacher="t", top_k=5, temperature=1.3, divergence=divergence)
        host, _, teacher, _ = packed(1, 5)
        own = teacher.float().requires_grad_()
        values = measured(recipe, host, teacher, own, False, [(0, 4)])
        assert abs(float(values[1].detach())) < 1e-6
        assert float(torch.autograd.grad(values[0], own)[0].abs().max()) < 1e-6


# -- a teacher's folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A teacher, and a dataset of chats that was built with its tokenizer."""
    root, tokenizer = tmp_path_factory.mktemp("distill"), byte_tokenizer()
    model = Model(layers=1, dim=32, heads=2, vocab_size=tokenizer.vocab_size)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=5)
    write_folder(root / "teacher", model, decoder.state_dict())
    write_model_folder(root / "teacher", tokenizer, CHATML)
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * (i % 4 + 1)}]}
        for i in range(24)
    ]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_chat_dataset(root / "data", [str(root / "chats.jsonl")], ChatOptions(str(root / "teacher")))
    return root


def make_recipe(folder: Path, **objective) -> Recipe:
    return Recipe.model_validate({
        "model": {"layers": 1, "dim": 32, "heads": 2},
        "objective": {"kind": "distill", "teacher": str(folder / "teacher"), "top_k": 4, **objective},
        "data": {"path": str(folder / "data"), "seq": 96, "holdout": 0.1},
        "train": {"steps": 2, "batch": 2, "device": "cpu"},
    })  # fmt: skip


def test_stored_tokens_are_those_of_the_live_teacher_and_are_computed_once(folder):
    recipe = resolve_recipe(make_recipe(folder, mode="cached"), folder)
    world, corpus, objective = World(0, 1, torch.device("cpu")), open_corpus(recipe), recipe.objective
    teacher = load_teacher(recipe, objective, world, lambda model, own, _: load_into(model, Path(own.model.init)))
    stored = stored_targets(recipe, objective, corpus, world, lambda *_: None, lambda: teacher, "run")
    again = stored_targets(recipe, objective, corpus, world, lambda *_: None, pytest.fail, "run")
    assert np.array_equal(stored.ids, again.ids)
    reader = WithTeacher(corpus.reader(), stored)
    ids = np.array([reader.windows - 1, 0, 1])
    read, plain = reader.read(ids), corpus.reader().read(ids)
    live = teacher.teach(
        DeviceBatch(*(torch.from_numpy(x.copy()) for x in (plain.inputs, plain.labels, plain.documents)))
    )
    unmasked = plain.labels != -100
    assert unmasked.any()
    assert np.array_equal(read.columns[TEACHER_IDS][unmasked], live.columns[TEACHER_IDS].numpy()[unmasked])
    assert np.allclose(
        read.columns[TEACHER_LOGPROBS][unmasked], live.columns[TEACHER_LOGPROBS].numpy()[unmasked], atol=1e-6
    )


def test_a_teacher_is_read_in_the_precision_of_products(folder):
    recipe = make_recipe(folder).model_copy(
        update={"train": make_recipe(folder).train.model_copy(update={"dtype": "bfloat16"})}
    )
    own = recipe_of_teacher(recipe, recipe.objective)
    assert (own.train.weights, own.model.layers, own.lora) == ("bfloat16", 1, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nowhere", "is neither a folder nor a run"),
        ("renamed token", "has another tokenizer than the data"),
        ("merges", "other merges"),
        ("no tokenizer", "has no tokenizer.json"),
        ("top_k", "objective.top_k is 4000"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_by_name(change, message, folder, tmp_path):
    import shutil

    teacher = tmp_path / "teacher"
    shutil.copytree(folder / "teacher", teacher)
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    settings = {"teacher": str(teacher)}
    match change:
        case "nowhere":
            settings = {"teacher": str(tmp_path / "gone")}
        case "renamed token":  # as many tokens as before
            content["added_tokens"][-1]["content"] += "!"
            file.write_text(json.dumps(content))
        case "merges":
            content["model"]["merges"] = [["a", "b"]]
            file.write_text(json.dumps(content))
        case "no tokenizer":
            file.unlink()
        case "top_k":
            settings["top_k"] = 4000
    with pytest.raises(HeadwayError, match=message) as raised:
        resolve_recipe(make_recipe(folder, **settings), tmp_path)
    assert raised.value.hint
    assert raised.value.usage


def test_another_formatting_of_the_same_tokenizer_is_the_same(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "teacher", tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    resolved = resolve_recipe(make_recipe(folder, teacher=str(tmp_path / "teacher")), tmp_path)
    assert resolved.objective.digest
