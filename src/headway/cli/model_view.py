"""How `headway model` looks: one document for programs, and tables of at most 80 columns for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headway.cli.text import count
from headway.recipe import Model
from headway.recipe.rope import RotaryModel

if TYPE_CHECKING:
    from headway.cli.model import NamedModel
    from headway.plan.model_summary import ModelSummary
    from headway.state.checkpoint_diff import TensorDifference

__all__ = ["diff_document", "diff_lines", "document_of", "next_line", "show_lines"]

WIDTH = 80
SHOWN = 12
KINDS = {"folder": "a Hugging Face folder", "recipe": "a recipe", "run": "a run", "checkpoint": "a checkpoint"}
NEXT = {
    "folder": "headway checkpoint import {}",
    "recipe": "headway plan {}",
    "run": "headway checkpoint show {}",
    "checkpoint": "headway checkpoint show {}",
}
NOT_THE_MODEL = {"init", "layout", "class", "args"}
"""Keys of a model section that say nothing of what a decoder is."""

Kinds = Mapping[str, tuple[str | None, tuple[int, ...]]]


# -- show


def document_of(
    subject: "NamedModel",
    found: "ModelSummary",
    stored: Mapping[str, Any] | None,
    template: Mapping[str, Any] | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """All that is known of a model, for programs."""
    training = asdict(found.training) | {"total": found.training.total}
    return {
        "name": subject.name,
        "kind": subject.kind,
        "family": subject.model.family,
        "model_type": _model_type(subject.model, subject.seq),
        "fields": _fields(subject.model),
        **asdict(found),
        "training": training,
        "stored": stored,
        "chat_template": template,
        "notes": list(notes),
    }


def _model_type(model: Model, seq: int) -> str | None:
    """What `transformers` calls it; None where it has no such decoder."""
    from headway.errors import ModelError

    try:
        return str(model.to_config(seq)["model_type"])
    except ModelError:
        return None


def _fields(model: Model) -> dict[str, Any]:
    return {key: value for key, value in model.model_dump(mode="json").items() if key not in NOT_THE_MODEL}


def show_lines(model: Model, document: Mapping[str, Any]) -> Iterator[str]:
    """A model for people."""
    kind = document["model_type"]
    yield _fit(f"{document['name']}: {KINDS[document['kind']]}")
    yield _fact("family", f"{model.family} ({f'transformers: {kind}' if kind else 'transformers has none like it'})")
    yield from _shape_lines(model, document["windows"])
    yield _fact("parameters", f"{count(document['parameters'])} ({document['parameters']:,})")
    for part, number in document["parts"].items():
        yield f"  {part:<16}{number:>20,}{number / document['parameters']:>9.1%}"
    if document["active"] != document["parameters"]:
        share = document["active"] / document["parameters"]
        yield _fact("active", f"{count(document['active'])} a token ({document['active']:,}, {share:.1%})")
    yield from _cost_lines(document)
    if document["stored"] is not None:
        dtypes = ", ".join(f"{name} {_size(number)}" for name, number in document["stored"]["dtypes"].items())
        yield _fact("stored", f"{document['stored']['tensors']:,} tensors: {dtypes}")
    if document["kind"] == "folder":
        yield _fact("template", _template(document["chat_template"]))
    for note in document["notes"]:
        yield from _wrap(f"note: {note}")


def _shape_lines(model: Model, windows: Mapping[int, int]) -> Iterator[str]:
    yield _fact("shape", f"{model.layers} layers, width {model.dim:,}, feed-forward {model.hidden:,}")
    keys = "" if model.kv_heads == model.heads else f", {model.kv_heads} of keys and values"
    yield _fact("heads", f"{model.heads} of {model.head_dim}{keys}")
    experts = model.architecture().experts
    if experts is not None:
        shared = f", {experts.shared} for all" if experts.shared else ""
        dense = f"; the first {experts.dense_layers} layers have none" if experts.dense_layers else ""
        yield _fact("experts", f"{experts.top_k} of {experts.count}, each {experts.hidden:,} wide{shared}{dense}")
    tied = "tied" if model.tie_embeddings else "not tied"
    yield _fact("vocabulary", f"{model.vocabulary:,}, embedding and head {tied}")
    yield _fact("positions", _positions(model))
    seen = [f"{window:,} tokens in {layers} of {model.layers} layers" for window, layers in windows.items()]
    yield _fact("windows", ", ".join(seen) or "none: each token sees all before it")


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
    """Memory, operations, cache."""
    yield _fact("weights", ", ".join(f"{name} {_size(number)}" for name, number in document["weights"].items()))
    training = document["training"]
    states = f"weights {_size(training['weights'])}, gradients {_size(training['gradients'])}"
    yield _fact(
        "training", f"{_size(training['total'])}: {states}, {training['optimizer']} {_size(training['states'])}"
    )
    yield _fact("", "and activations, which headway plan knows")
    full = count(document["flops_per_token_full_attention"])
    yield _fact(
        "FLOPs",
        f"{count(document['flops_per_token'])} a token of training at {document['seq']:,} ({full} if not causal)",
    )
    cache = document["cache"]
    yield _fact(
        "cache", f"{_size(cache['token'])} a token; {cache['length']:,} tokens: {_size(cache['full'])} (bfloat16)"
    )
    if cache["windowed"] != cache["full"]:
        yield _fact("", f"{_size(cache['windowed'])} if windowed layers keep no more than they see")


def _template(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    begins = "".join(letter if letter.isprintable() else " " for letter in found["begins"])
    start = f"{found['file']}, {found['letters']:,} letters: "
    room = WIDTH - 11 - len(start)
    return start + (begins if len(begins) <= room else f"{begins[: room - 3]}...")


def next_line(what: str, kind: str) -> str:
    """What to do with it."""
    import shlex

    return f"next: {NEXT[kind].format(shlex.quote(what))}"


# -- diff


def diff_document(
    a: "NamedModel", b: "NamedModel", first: Kinds, second: Kinds, values: "Sequence[TensorDifference] | None"
) -> dict[str, Any]:
    """In what two models differ, for programs; pairs are (first, second)."""
    from headway.state.weight_diff import tensor_mismatches

    one, other = _fields(a.model), _fields(b.model)
    fields = {key: (one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)}
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


def _by_part(values: "Sequence[TensorDifference]") -> dict[str, dict[str, Any]]:
    """The values' differences by part of the model; the tensor with the largest one stands for its part."""
    from headway.plan.model_summary import PARTS, part_of

    found: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        inside = [one for one in values if part_of(one.name) == part]
        if inside:
            worst = max(inside, key=lambda one: (one.absolute, one.differing))
            found[part] = {
                "tensors": len(inside),
                "elements": sum(one.elements for one in inside),
                "differing": sum(one.differing for one in inside),
                "absolute": worst.absolute,
                "relative": max(one.relative for one in inside),
                "worst": worst.name if worst.differing else None,
            }
    return found


def diff_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Two models side by side."""
    a, b = document["models"]
    yield from _wrap(f"{a} and {b}: {_verdict(document)}")
    if document["fields"]:
        yield f"  {'field':<22}{'first':<28}second"
    for key, (one, other) in document["fields"].items():
        yield _fit(f"  {key:<22}{_short(one):<27} {_short(other)}")
    tensors = document["tensors"]
    for label, names in ((a, tensors["only_first"]), (b, tensors["only_second"])):
        if names:
            yield from _wrap(f"only in {label}: {_some(names)}")
    for name, shapes in list(tensors["shapes"].items())[:SHOWN]:
        yield _fit(f"  {name}: {' | '.join('x'.join(map(str, shape)) for shape in shapes)}")
    if len(tensors["shapes"]) > SHOWN:
        yield f"  and {len(tensors['shapes']) - SHOWN:,} more of another shape (--json lists all)"
    pairs = [" | ".join(pair) for pair in tensors["dtypes"].values()]
    for pair in dict.fromkeys(pairs):
        yield f"  {pairs.count(pair):,} tensors: {pair}"
    yield from _value_lines(document["values"])
    for note in document["notes"]:
        yield from _wrap(f"note: {note}")
    yield _next_of_diff(document)


def _next_of_diff(document: Mapping[str, Any]) -> str:
    """Values, where there are any and they were not asked for; otherwise one of the two by itself."""
    import shlex

    names = " ".join(shlex.quote(name) for name in document["models"])
    if document["values"] is None and document["tensors"]["both"] and all(document["has_weights"]):
        return f"next: headway model diff {names} --weights"
    return f"next: headway model show {shlex.quote(document['models'][0])}"


def _value_lines(values: Mapping[str, Mapping[str, Any]] | None) -> Iterator[str]:
    if not values:
        return
    yield f"  {'part':<16}{'values that differ':>27}{'largest':>10}{'relative':>10}"
    for part, one in values.items():
        differing = f"{one['differing']:,} of {one['elements']:,}"
        yield f"  {part:<16}{differing:>27}{one['absolute']:>10.2g}{one['relative']:>10.2g}"
        if one["worst"]:
            yield _fit(f"    most in {one['worst']}")


def _verdict(document: Mapping[str, Any]) -> str:
    tensors, values = document["tensors"], document["values"]
    compared = "fields, tensors and values" if values is not None else "fields and tensors; values were not compared"
    if document["same"]:
        return f"the same {compared}"
    numbers = [
        (len(document["fields"]), "field", ""),
        (len(tensors["only_first"]) + len(tensors["only_second"]), "tensor", " that only one has"),
        (len(tensors["shapes"]), "tensor", " of another shape"),
        (len(tensors["dtypes"]), "tensor", " of another dtype"),
        (sum(part["differing"] for part in (values or {}).values()), "value", ""),
    ]
    said = [f"{number:,} {noun}{'' if number == 1 else 's'}{which}" for number, noun, which in numbers if number]
    return f"they differ in {', '.join(said)}"


# -- lines


def _size(number: float) -> str:
    """Bytes with four digits. Written out here: that of checkpoints brings NumPy along, which takes a while."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def _fact(label: str, text: str) -> str:
    return _fit(f"{label:<10} {text}")


def _fit(line: str) -> str:
    """A line within the width; what is cut is cut at its end."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _wrap(text: str) -> list[str]:
    import textwrap

    return [_fit(line) for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)]


def _short(value: Any) -> str:
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 27 else f"{text[:24]}..."


def _some(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more:,} more" if more > 0 else "")
