"""Formats `headway model`: JSON, and tables of at most 80 columns."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headway.cli.text import byte_size, columns, count, first_names, plural, shortened
from headway.errors import ModelError
from headway.plan.model_summary import PARTS, ModelSummary, part_of
from headway.recipe import Lora, Model, Train
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.rope import RotaryModel
from headway.state.checkpoint_diff import TensorDifference
from headway.state.weight_diff import tensor_mismatches
from headway.track import command

SHOWN = 12
KINDS = {"folder": "a Hugging Face folder", "recipe": "a recipe", "run": "a run", "checkpoint": "a checkpoint"}
NEXT = {
    "folder": "checkpoint import",
    "recipe": "plan",
    "run": "checkpoint show",
    "checkpoint": "checkpoint show",
}
NOT_THE_MODEL = {"init", "layout", "class", "args"}
"""Keys of a model section that do not describe the decoder."""

Kinds = Mapping[str, tuple[str | None, tuple[int, ...]]]


# -- show


@dataclass(frozen=True)
class NamedModel:
    """A model named on the command line."""

    name: str
    """As typed."""
    kind: Literal["folder", "recipe", "run", "checkpoint"]
    model: Model
    seq: int
    """Sequence length in training."""
    longest: int
    """Longest sequence that it supports."""
    train: Train | None = None
    folder: Path | None = None
    checkpoint: str | None = None
    """Its weights are in `folder`, at this address, or nowhere yet."""
    notes: tuple[str, ...] = ()
    lora: Lora | None = None
    """Adapters that are trained instead of the model."""


def document_of(
    named: "NamedModel",
    summary: ModelSummary,
    stored: Mapping[str, Any] | None,
    template: Mapping[str, Any] | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return all that is known of a model as JSON-ready values."""
    training = asdict(summary.training) | {"total": summary.training.total}
    return {
        "name": named.name,
        "kind": named.kind,
        "family": named.model.family,
        "model_type": _model_type(named.model, named.seq),
        "fields": _fields(named.model),
        **asdict(summary),
        "training": training,
        "stored": stored,
        "chat_template": template,
        "notes": list(notes),
    }


def _model_type(model: Model, seq: int) -> str | None:
    """Return the name in `transformers` or `diffusers`; None if it has no such model."""
    try:
        config = model.to_config(seq)
    except ModelError:
        return None
    return str(config["_class_name"] if isinstance(model, DiffusionModel) else config["model_type"])


def _fields(model: Model) -> dict[str, Any]:
    return {key: value for key, value in model.model_dump(mode="json").items() if key not in NOT_THE_MODEL}


def show_lines(model: Model, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a model as text."""
    kind = document["model_type"]
    yield shortened(f"{document['name']}: {KINDS[document['kind']]}", columns())
    library = "diffusers" if isinstance(model, DiffusionModel) else "transformers"
    yield _fact("family", f"{model.family} ({f'{library}: {kind}' if kind else f'not in {library}'})")
    yield from _shape_lines(model, document["windows"])
    yield _fact("parameters", f"{count(document['parameters'])} ({document['parameters']:,})")
    for part, number in document["parts"].items():
        yield f"  {part:<16}{number:>20,}{number / document['parameters']:>9.1%}"
    if document["active"] != document["parameters"]:
        share = document["active"] / document["parameters"]
        yield _fact("active", f"{count(document['active'])} per token ({document['active']:,}, {share:.1%})")
    yield from _cost_lines(document)
    if document["stored"] is not None:
        dtypes = ", ".join(f"{name} {byte_size(number)}" for name, number in document["stored"]["dtypes"].items())
        yield _fact("stored", f"{plural(document['stored']['tensors'], 'tensor')}: {dtypes}")
    if document["kind"] == "folder" and not isinstance(model, DiffusionModel):
        yield _fact("template", _template(document["chat_template"]))
    for note in document["notes"]:
        yield from _wrap(f"note: {note}")


def _shape_lines(model: Model, windows: Mapping[int, int]) -> Iterator[str]:
    yield _fact("shape", f"{plural(model.layers, 'layer')}, width {model.dim:,}, feed-forward {model.hidden:,}")
    keys = "" if model.kv_heads == model.heads else f", {model.kv_heads} KV heads"
    yield _fact("heads", f"{model.heads} of {model.head_dim}{keys}")
    if isinstance(model, DiffusionModel):
        yield from _diffusion_lines(model)
        return
    experts = model.architecture().experts
    if experts is not None:
        shared = f", {experts.shared} shared" if experts.shared else ""
        dense = (
            f"; the first {experts.dense_layers} layers are dense"
            if experts.dense_layers > 1
            else "; the first layer is dense" * experts.dense_layers
        )
        yield _fact("experts", f"{experts.top_k} of {experts.count}, each {experts.hidden:,} wide{shared}{dense}")
    tied = "tied" if model.tie_embeddings else "not tied"
    yield _fact("vocabulary", f"{model.vocabulary:,}, embedding and head {tied}")
    yield _fact("positions", _positions(model))
    seen = [f"{window:,} tokens in {layers} of {model.layers} layers" for window, layers in windows.items()]
    yield _fact("windows", ", ".join(seen) or "none: full causal attention")


def _diffusion_lines(model: DiffusionModel) -> Iterator[str]:
    frames, rows, columns_ = model.patch_sizes
    extra = f" and {model.input_channels - model.in_channels} of an image" * (model.input_channels > model.in_channels)
    yield _fact(
        "patches", f"{frames} x {rows} x {columns_} (frames, rows, columns) of {model.in_channels} channels{extra}"
    )
    if model.conditioning == "class":
        yield _fact("condition", f"a class of {model.num_classes:,}")
    else:
        yield _fact("condition", f"a text of {model.text_tokens} tokens, in states of width {model.text_dim:,}")
    yield _fact("attention", "full: every patch attends to all")


def _positions(model: Model) -> str:
    if model.longest is not None:
        return f"learned, {model.longest:,} of them"
    if not isinstance(model, RotaryModel):
        return "none"
    part = "" if model.rotary_dim == model.head_dim else f" of {model.rotary_dim} of {model.head_dim} numbers"
    scaling = model.rope_scaling
    if scaling is None:
        return f"rotary{part}, theta {model.rope_theta:,.10g}"
    original = f" from {scaling.original:,} tokens" if scaling.original else ""
    return f"rotary{part}, theta {model.rope_theta:,.10g}, {scaling.kind} x {scaling.factor:g}{original}"


def _cost_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield memory, FLOPs and KV cache."""
    yield _fact("weights", ", ".join(f"{name} {byte_size(number)}" for name, number in document["weights"].items()))
    training = document["training"]
    states = f"weights {byte_size(training['weights'])}, gradients {byte_size(training['gradients'])}"
    yield _fact(
        "training", f"{byte_size(training['total'])}: {states}, {training['optimizer']} {byte_size(training['states'])}"
    )
    yield _fact("", "plus activations: see headway plan")
    if document["flops_per_sample"] is not None:
        sample = count(document["flops_per_sample"])
        yield _fact("FLOPs", f"{sample} per training sample of {document['seq']:,} patches (--seq)")
        return
    full = count(document["flops_per_token_full_attention"])
    yield _fact(
        "FLOPs",
        f"{count(document['flops_per_token'])} per training token at {document['seq']:,} ({full} if not causal)",
    )
    cache = document["cache"]
    yield _fact(
        "cache",
        f"{byte_size(cache['token'])} per token; {cache['length']:,} tokens: {byte_size(cache['full'])} (bfloat16)",
    )
    if cache["windowed"] != cache["full"]:
        yield _fact("", f"{byte_size(cache['windowed'])} if windowed layers cache their window only")


def _template(template: Mapping[str, Any] | None) -> str:
    if template is None:
        return "none"
    begins = "".join(letter if letter.isprintable() else " " for letter in template["begins"])
    start = f"{template['file']}, {template['letters']:,} characters: "
    room = columns() - 11 - len(start)
    return start + (begins if len(begins) <= room else f"{begins[: room - 3]}...")


def next_line(root: Path, what: str, kind: str) -> str:
    """Return a command to continue with."""
    words = [NEXT[kind], shlex.quote(what)]
    return f"next: {' '.join(['headway', *words]) if kind == 'recipe' else command(root, *words)}"


# -- diff


def diff_document(
    a: "NamedModel", b: "NamedModel", first: Kinds, second: Kinds, values: Sequence[TensorDifference] | None
) -> dict[str, Any]:
    """Return the differences of two models as JSON-ready values; pairs are (first, second)."""
    first_fields, second_fields = _fields(a.model), _fields(b.model)
    fields = {
        key: (first_fields.get(key), second_fields.get(key))
        for key in {**first_fields, **second_fields}
        if first_fields.get(key) != second_fields.get(key)
    }
    tensors = tensor_mismatches(first, second)
    parts = None if values is None else _by_part(values)
    return {
        "same": not fields and tensors.none and not any(part["differing"] for part in (parts or {}).values()),
        "models": (a.name, b.name),
        "notes": [*a.notes, *b.notes],
        "fields": fields,
        "tensors": {"both": len(first.keys() & second.keys()), **asdict(tensors)},
        "has_weights": tuple(None not in {dtype for dtype, _ in kinds.values()} for kinds in (first, second)),
        "values": parts,
    }


def _by_part(values: Sequence[TensorDifference]) -> dict[str, dict[str, Any]]:
    """Return the differences of weights by part of the model, with the worst tensor of each."""
    parts: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        inside = [tensor for tensor in values if part_of(tensor.name) == part]
        if inside:
            worst = max(inside, key=lambda tensor: (tensor.absolute, tensor.differing))
            parts[part] = {
                "tensors": len(inside),
                "elements": sum(tensor.elements for tensor in inside),
                "differing": sum(tensor.differing for tensor in inside),
                "absolute": worst.absolute,
                "relative": max(tensor.relative for tensor in inside),
                "worst": worst.name if worst.differing else None,
            }
    return parts


def diff_lines(root: Path, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of two models as text."""
    a, b = document["models"]
    yield from _wrap(f"{a} and {b}: {_verdict(document)}")
    if document["fields"]:
        yield f"  {'field':<22}{'first':<28}second"
    for key, (value_a, value_b) in document["fields"].items():
        yield shortened(f"  {key:<22}{_short(value_a):<27} {_short(value_b)}", columns())
    tensors = document["tensors"]
    for label, names in ((a, tensors["only_first"]), (b, tensors["only_second"])):
        if names:
            yield from _wrap(f"only in {label}: {first_names(names)}")
    for name, shapes in list(tensors["shapes"].items())[:SHOWN]:
        yield shortened(f"  {name}: {' | '.join('x'.join(map(str, shape)) for shape in shapes)}", columns())
    if len(tensors["shapes"]) > SHOWN:
        yield f"  and {len(tensors['shapes']) - SHOWN:,} more of another shape (--json lists all)"
    pairs = [" | ".join(pair) for pair in tensors["dtypes"].values()]
    for pair in dict.fromkeys(pairs):
        yield f"  {plural(pairs.count(pair), 'tensor')}: {pair}"
    yield from _value_lines(document["values"])
    for note in document["notes"]:
        yield from _wrap(f"note: {note}")
    yield _next_of_diff(root, document)


def _next_of_diff(root: Path, document: Mapping[str, Any]) -> str:
    """Suggest comparing values if both have weights; else showing the first model."""
    names = " ".join(shlex.quote(name) for name in document["models"])
    if document["values"] is None and document["tensors"]["both"] and all(document["has_weights"]):
        return f"next: {command(root, 'model diff', names, '--weights')}"
    return f"next: {command(root, 'model show', shlex.quote(document['models'][0]))}"


def _value_lines(values: Mapping[str, Mapping[str, Any]] | None) -> Iterator[str]:
    if not values:
        return
    yield f"  {'part':<16}{'values that differ':>27}{'largest':>10}{'relative':>10}"
    for part, values_of_part in values.items():
        differing = f"{values_of_part['differing']:,} of {values_of_part['elements']:,}"
        yield f"  {part:<16}{differing:>27}{values_of_part['absolute']:>10.2g}{values_of_part['relative']:>10.2g}"
        if values_of_part["worst"]:
            yield shortened(f"    most in {values_of_part['worst']}", columns())


def _verdict(document: Mapping[str, Any]) -> str:
    tensors, values = document["tensors"], document["values"]
    compared = "fields, tensors and values" if values is not None else "fields and tensors; values not compared"
    if document["same"]:
        return f"the same {compared}"
    numbers = [
        (len(document["fields"]), "field", ""),
        (len(tensors["only_first"]) + len(tensors["only_second"]), "tensor", " that only one has"),
        (len(tensors["shapes"]), "tensor", " of another shape"),
        (len(tensors["dtypes"]), "tensor", " of another dtype"),
        (sum(part["differing"] for part in (values or {}).values()), "value", ""),
    ]
    differences = [plural(number, noun) + which for number, noun, which in numbers if number]
    return f"they differ in {', '.join(differences)}"


# -- lines


def _fact(label: str, text: str) -> str:
    return shortened(f"{label:<10} {text}", columns())


def _wrap(text: str) -> list[str]:
    return [
        shortened(line, columns())
        for line in textwrap.wrap(text, columns(), subsequent_indent="  ", break_long_words=False)
    ]


def _short(value: Any) -> str:
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 27 else f"{text[:24]}..."
