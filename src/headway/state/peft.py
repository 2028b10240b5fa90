"""Adapters in PEFT's file format, both ways, and merged into the weights of their base. NumPy, without torch.

A folder has adapter_config.json (rank, alpha, target modules) and adapter_model.safetensors, whose tensors are named
base_model.model.<module>.lora_A.weight and lora_B.weight by the modules of `transformers`. Ours also has headway.json
with a digest of the base's weights, so that an adapter is never used with another base unnoticed.

Some families of `transformers` pack several linear layers into one. Reading splits B by its rows; writing joins the
adapters of a packed layer into one of a larger rank, B being block-diagonal: the same map.

Of a diffusion transformer, the folder also has pytorch_lora_weights.safetensors, which a pipeline of diffusers loads:
the same tensors, named transformer.<module>.lora_A.weight, with the scale multiplied into B.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import ModelError, StateError
from headway.recipe import Lora, Model
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.lora import A, B, adapted_layers
from headway.recipe.model import HfTensor
from headway.state import hf_packing as packing
from headway.state.huggingface import LazyWeight, new_model_folder, write_json, write_weight_file
from headway.state.read_checkpoint import OpenCheckpoint, read_box
from headway.state.safetensors_file import bits_dtype, read_header

CONFIG, WEIGHTS, FACTS = "adapter_config.json", "adapter_model.safetensors", "headway.json"
PREFIX = "base_model.model."
PIPELINE_WEIGHTS, PIPELINE_PREFIX = "pytorch_lora_weights.safetensors", "transformer."

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one linear layer, in float32."""

    a: Floats
    """[r, in]."""
    b: Floats
    """[out, r]."""
    scale: float

    @property
    def delta(self) -> Floats:
        """What it adds to the layer's weight [out, in]."""
        return np.float32(self.scale) * (self.b @ self.a)


@dataclass(frozen=True)
class Adapter:
    """Adapters by layer, by Headway's names."""

    name: str
    """Where they come from, for messages."""
    layers: dict[str, LayerAdapter]
    rslora: bool = False
    base: str | None = None
    """Digest of the base that they were trained on, if known."""
    base_name: str = ""
    dropout: float = 0.0
    """Of the adapters' input, in training."""

    def tensors(self) -> dict[str, Floats]:
        """Return the matrices by the names of parameters."""
        return {f"{layer}.{key}": value for layer, x in self.layers.items() for key, value in ((A, x.a), (B, x.b))}


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder has adapters in PEFT's format."""
    return (folder / CONFIG).is_file()


def base_of_adapter(folder: Path) -> Path:
    """Return the folder of the base that adapters name; raise ModelError if there is none here."""
    base = Path(str(_json(folder / CONFIG).get("base_model_name_or_path") or ""))
    if not (base / "config.json").is_file():
        raise ModelError(
            f"{folder} names the base {str(base)!r}, which is not a Hugging Face folder here",
            hint="name its folder with --base",
        )
    return base


def adapter_of_run(checkpoint: OpenCheckpoint, model: Model, lora: Lora, prefix: str = "model/") -> Adapter:
    """Return the adapters of a checkpoint."""
    layers = dict[str, LayerAdapter]()
    for layer in adapted_layers(model, lora.targets):
        a, b = (_read(checkpoint, f"{prefix}{layer}.{key}") for key in (A, B))
        layers[layer] = LayerAdapter(a, b, lora.scale)
    return Adapter(checkpoint.location, layers, lora.rslora, lora.base, model.init or "", lora.dropout)


def _read(checkpoint: OpenCheckpoint, name: str) -> Floats:
    entry = checkpoint.manifest.tensors.get(name)
    if entry is None or entry.dtype != "float32":
        raise StateError(f"{checkpoint.location} has no adapter {name}", hint="it belongs to another recipe")
    bits = np.empty(entry.shape, bits_dtype(entry.dtype))
    read_box(checkpoint, name, (0,) * len(entry.shape), entry.shape, out=bits)
    return bits.view(np.float32)


# -- PEFT's folders


def read_adapter(folder: Path, model: Model) -> Adapter:
    """Return the adapters of a folder for a model, checked against its layers; nothing in it is executed."""
    config = _json(folder / CONFIG)
    _refuse(config, folder)
    weights = _float_tensors(folder / WEIGHTS)
    packed = {form.name.removesuffix(".weight"): form for form in _linear_forms(model)}
    layers = dict[str, LayerAdapter]()
    for module in dict.fromkeys(_module(name, folder) for name in weights):
        form = packed.get(module)
        if form is None:
            raise ModelError(
                f"{folder} has an adapter of {module}, which is not a linear layer of a block of this {model.family}",
                hint="it belongs to another model, or adapts the embedding or the head, which is not supported",
            )
        a, b = (weights.get(f"{PREFIX}{module}.lora_{side}.weight") for side in "AB")
        if a is None or b is None:
            raise ModelError(f"{folder} has only one matrix of the adapter of {module}")
        _check_shapes(folder, module, form, model, a, b)
        scale = _scale(config, module, a.shape[0])
        for which, name in enumerate(form.headway_names):
            layers[name.removesuffix(".weight")] = LayerAdapter(a, _part(form, b, which), scale)
    facts = _json(folder / FACTS) if (folder / FACTS).is_file() else {}
    ordered = {name: layers[name] for name in adapted_layers(model) if name in layers}
    base_name = str(config.get("base_model_name_or_path") or "")
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ModelError(f"{folder / CONFIG} has lora_dropout {dropout!r}, which is no share")
    rslora = bool(config.get("use_rslora"))
    return Adapter(str(folder), ordered, rslora, facts.get("base"), base_name, float(dropout))


def check_same_base(adapter: Adapter, digest: str, base: str) -> None:
    """Raise ModelError if an adapter says that it was trained on other weights than these."""
    if adapter.base not in (None, digest):
        raise ModelError(
            f"{adapter.name} is an adapter for another base: that has digest {adapter.base}, {base} has {digest}",
            hint=f"it was trained on {adapter.base_name}",
        )


def write_adapter(folder: Path, model: Model, adapter: Adapter) -> None:
    """Write a folder that `peft` opens; it appears complete or not at all."""
    tensors, ranks = dict[str, Floats](), dict[str, int]()
    for form in _linear_forms(model):
        parts = [adapter.layers.get(name.removesuffix(".weight")) for name in form.headway_names]
        if not any(parts):
            continue
        module = form.name.removesuffix(".weight")
        joined = _joined(form, parts, model)
        ranks[module] = joined.a.shape[0]
        tensors |= {f"{PREFIX}{module}.lora_A.weight": joined.a, f"{PREFIX}{module}.lora_B.weight": joined.b}
    with new_model_folder(folder) as partial_folder:
        write_json(partial_folder / CONFIG, _config(model, adapter, ranks))
        write_json(partial_folder / FACTS, {"base": adapter.base})
        _write(partial_folder / WEIGHTS, tensors)
        if isinstance(model, DiffusionModel):
            _write(partial_folder / PIPELINE_WEIGHTS, _of_pipeline(tensors, adapter))


def _write(file: Path, tensors: Mapping[str, Floats]) -> None:
    for _ in write_weight_file(file, {name: _lazy(value) for name, value in tensors.items()}):
        pass


def _of_pipeline(tensors: Mapping[str, Floats], adapter: Adapter) -> dict[str, Floats]:
    """Return tensors by the names of a diffusers pipeline, which takes alpha to be the rank."""
    scale = np.float32(next(iter(adapter.layers.values())).scale)
    return {
        f"{PIPELINE_PREFIX}{name.removeprefix(PREFIX)}": value if ".lora_A." in name else scale * value
        for name, value in tensors.items()
    }


def _lazy(values: Floats) -> LazyWeight:
    return LazyWeight("float32", values.shape, lambda: [np.ascontiguousarray(values).reshape(-1).view(np.uint8).data])


def lora_of(adapter: Adapter, model: Model) -> dict[str, Any]:
    """Return the recipe settings of adapters that training continues: all of one rank and scale."""
    ranks = {layer.a.shape[0] for layer in adapter.layers.values()}
    scales = {layer.scale for layer in adapter.layers.values()}
    if len(ranks) != 1 or len(scales) != 1:
        raise ModelError(
            f"lora.init = {adapter.name!r} has adapters of different ranks or scales, which cannot be trained further",
            hint="merge them into the base first, and start new adapters",
        )
    (rank,), (scale,) = ranks, scales
    alpha = float(f"{scale * (math.sqrt(rank) if adapter.rslora else rank):.12g}")
    everything = set(adapter.layers) == set(adapted_layers(model))
    targets = () if everything else tuple(adapter.layers)
    settings = {"rank": rank, "alpha": alpha, "rslora": adapter.rslora, "targets": targets}
    return settings | ({"dropout": adapter.dropout} if adapter.dropout else {})


# -- merging


def merged_weights(weights: Mapping[str, LazyWeight], adapter: Adapter) -> dict[str, LazyWeight]:
    """Return the base's weights with adapters added: in float32, rounded once to the base's precision."""
    merged = dict(weights)
    for layer, x in adapter.layers.items():
        base = weights[f"{layer}.weight"]
        merged[f"{layer}.weight"] = LazyWeight(base.dtype, base.shape, partial(_merge, base, x))
    return merged


def _merge(base: LazyWeight, adapter: LayerAdapter) -> Iterator[memoryview]:
    raw = np.frombuffer(b"".join(bytes(block) for block in base.blocks()), dtype=np.uint8)
    total = to_float32(raw, base.dtype).reshape(base.shape) + adapter.delta
    yield from_float32(total, base.dtype).reshape(-1).view(np.uint8).data


def to_float32(raw: npt.NDArray[np.uint8], dtype: str) -> Floats:
    """Return numbers of a dtype as float32, from their bytes."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype not in ("float16", "float32"):
        raise ModelError(f"weights in {dtype} cannot be merged with adapters", hint="float32, bfloat16 or float16")
    return raw.view(dtype).astype(np.float32)


def from_float32(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Return float32 numbers rounded to a dtype, to the nearest and ties to even."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype)


# -- names and shapes


def _linear_forms(model: Model) -> Iterator[HfTensor]:
    """Tensors of a Hugging Face folder that hold linear layers which can have adapters."""
    layers = {f"{layer}.weight" for layer in adapted_layers(model)}
    return (form for form in model.hf_tensors() if set(form.headway_names) <= layers)


def _by_rows(form: HfTensor) -> HfTensor:
    """How B [out, r] of a packed layer holds its parts: as the weight, but never transposed."""
    if form.form != "transposed":
        return form
    return HfTensor(form.name, form.headway_names, "rows", form.index, form.rows)


def _part(form: HfTensor, b: Floats, which: int) -> Floats:
    """Return the rows of B that belong to one layer of a packed one."""
    if len(form.headway_names) == 1:
        return b
    return np.ascontiguousarray(packing.unpack(_by_rows(form), b.view(np.uint32), which)).view(np.float32)


def _joined(form: HfTensor, parts: list[LayerAdapter | None], model: Model) -> LayerAdapter:
    """Return one adapter of a packed layer: A stacked, B block-diagonal."""
    present = [part for part in parts if part is not None]
    if len(parts) == 1:
        return present[0]
    rank, shapes, done = sum(part.a.shape[0] for part in present), model.tensors(), 0
    blocks = list[Floats]()
    for name, part in zip(form.headway_names, parts, strict=True):
        block = np.zeros((shapes[name][0], rank), np.float32)
        if part is not None:
            block[:, done : done + part.a.shape[0]] = part.b
            done += part.a.shape[0]
        blocks.append(block)
    bits = packing.pack(_by_rows(form), [block.view(np.uint32) for block in blocks])
    joined = np.ascontiguousarray(bits).view(np.float32)
    return LayerAdapter(np.concatenate([part.a for part in present]), joined, present[0].scale)


def _check_shapes(folder: Path, module: str, form: HfTensor, model: Model, a: Floats, b: Floats) -> None:
    shapes = [model.tensors()[name] for name in form.headway_names]
    wanted = (sum(shape[0] for shape in shapes), shapes[0][1])
    if (b.shape[0], a.shape[1]) != wanted or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"{folder} has an adapter of {module} for a layer of {b.shape[0]} x {a.shape[1]}, the model's is "
            f"{wanted[0]} x {wanted[1]}",
            hint="it is an adapter for another base",
        )


def _module(name: str, folder: Path) -> str:
    match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight", name)
    if match is None:
        raise ModelError(f"{folder} has tensor {name}, which is not a matrix of a LoRA adapter")
    return match.group(1)


# -- settings


def _config(model: Model, adapter: Adapter, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return PEFT's settings; alpha follows from rank and scale, so that packed layers keep their scale."""
    scale = next(iter(adapter.layers.values())).scale
    rank = max(set(ranks.values()), key=list(ranks.values()).count)
    others = {module: count for module, count in ranks.items() if count != rank}

    def alpha(count: int) -> float:
        value = scale * (math.sqrt(count) if adapter.rslora else count)
        return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value

    return {
        "peft_type": "LORA",
        "task_type": None if isinstance(model, DiffusionModel) else "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_name,
        "r": rank,
        "lora_alpha": alpha(rank),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "target_modules": _target_modules(model, set(ranks)),
        "rank_pattern": others,
        "alpha_pattern": {module: alpha(count) for module, count in others.items()},
        "bias": "none",
        "fan_in_fan_out": any(form.form == "transposed" for form in _linear_forms(model)),
        "inference_mode": True,
        "modules_to_save": None,
    }


def _target_modules(model: Model, modules: set[str]) -> list[str]:
    """Return the last parts of names where they say exactly these modules, else whole names."""
    last = {module.rpartition(".")[2] for module in modules}
    every = {form.name.removesuffix(".weight") for form in model.hf_tensors() if form.name.endswith(".weight")}
    meant = {module for module in every if module.rpartition(".")[2] in last}
    return sorted(last if meant == modules else modules)


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A of a module, as PEFT computes it."""
    stated = _of_pattern(config.get("rank_pattern"), module, config.get("r"))
    if stated != rank:
        raise ModelError(f"the adapter of {module} has rank {rank}, but {CONFIG} says {stated}")
    alpha = float(_of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha")))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, or the default."""
    matching = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matching, default)


def _refuse(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError for adapters that are more than A and B on linear layers."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder} has adapters of type {kind}", hint="only LORA is supported")
    wrong = [key for key in ("use_dora", "modules_to_save", "lora_bias", "layer_replication") if config.get(key)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    if wrong:
        raise ModelError(f"{folder / CONFIG} sets {wrong[0]}, which is not supported")


def _float_tensors(file: Path) -> dict[str, Floats]:
    if not file.is_file():
        raise ModelError(
            f"{file.parent} has no {file.name}", hint="pickled adapters (adapter_model.bin) are not opened"
        )
    tensors = {}
    for name, span in read_header(file).spans.items():
        raw = np.fromfile(file, np.uint8, span.end - span.begin, offset=span.begin)
        tensors[name] = to_float32(raw, span.dtype).reshape(span.shape)
    return tensors


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value
