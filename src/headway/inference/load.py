"""Models to serve: from a Hugging Face folder, from a checkpoint of a run in a folder or an object store, or live.

Nothing from either is executed: weights are safetensors, settings JSON; a chat template runs in a sandbox, and a class
of the user's own is one that the recipe names and the user has installed.
"""

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from headway.data.chat_template import read_chat_template, special_token_names
from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.errors import DataError, ModelError, RunError
from headway.inference.adapters import AdapterSet, add_adapters, merge_into
from headway.models import Decoder, empty_decoder, load_into
from headway.models.custom import build_own
from headway.recipe import Lora, Model, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.huggingface import read_model, stored_dtype
from headway.recipe.rope import RotaryModel
from headway.state import OpenCheckpoint, find_checkpoint, open_checkpoint
from headway.state.address import RUN_FILES, address_in_store, is_in_store, open_address, split_address
from headway.state.base_weights import base_digest, check_base, checkpoint_digest
from headway.state.hf_sidecars import longest_sequence
from headway.state.peft import adapter_of_run
from headway.state.tensors import load_weights, read_tensors
from headway.track import RunFolder, find_run, read_recipe, runs_root, split_ref
from headway.track.hub import local_model

DEFAULT_LENGTH = 8192
"""Tokens of a sequence, for a model that does not say."""
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Keys of generation_config.json that a request takes over."""


_FILE_OF_RUN = re.compile(r"(recipe|data|tokenizer)\.json|huggingface/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""Files of a run in a store that a model needs: names come from there, and none leads out of the folder."""


class ModelSource(BaseModel):
    """Where a process finds its model: a Hugging Face folder, a run's folder and checkpoint, or a store's address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path | None = None
    run: Path | None = None
    checkpoint: Path | None = None
    store: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    adapters: dict[str, Path] = {}
    """Folders of PEFT's or checkpoints of runs, by the names that requests use."""

    def load(self) -> "LoadedModel":
        """Load it."""
        if self.run is not None and self.checkpoint is not None:
            loaded = load_run(RunFolder(self.run), self.checkpoint, device=self.device, dtype=self.dtype)
        else:
            source = self.store or self.folder
            assert source is not None
            loaded = load_model(source, device=self.device, dtype=self.dtype)
        if self.adapters:
            loaded.add_adapters(self.adapters)
        return loaded


@dataclass
class LoadedModel:
    """A model in memory, and what is known of its text."""

    name: str
    module: nn.Module
    device: torch.device
    vocabulary: int
    """Tokens that may be sampled: the model's vocabulary may be padded beyond the tokenizer's."""
    max_length: int
    tokenizer: TextTokenizer | None = None
    end_ids: tuple[int, ...] = ()
    begin_id: int | None = None
    """The token that texts begin with."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of generation_config.json."""
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Names that a chat template may use, such as bos_token."""
    step: int | None = None
    adapters: AdapterSet | None = None
    """Adapters that requests choose by name."""
    base_digest: Callable[[], str | None] = lambda: None
    """Returns the digest of the weights that it was loaded from, where that is known."""

    def add_adapters(self, paths: Mapping[str, Path]) -> None:
        """Add adapters that requests choose by name; raise ModelError for one of another base."""
        self.adapters = add_adapters(self.module, paths, self.name, self.base_digest())

    @property
    def takes_cache(self) -> bool:
        """Whether passes can use a KV cache."""
        if isinstance(self.module, Decoder):
            return True
        parameters = inspect.signature(self.module.forward).parameters
        return "cache" in parameters and hasattr(self.module, "cache_shape")

    @property
    def switch_length(self) -> int | None:
        """LongRoPE: length beyond which a sequence has other rotary frequencies."""
        model = self.module.model if isinstance(self.module, Decoder) else None
        return model.switch_length if isinstance(model, RotaryModel) else None


def load_model(
    source: str | Path, *, device: str = "auto", dtype: str = "auto", runs: Path | None = None
) -> LoadedModel:
    """Load a Hugging Face folder; RUN, RUN@STEP or `last`; or s3://bucket/RUN, with @STEP if not the newest."""
    source = local_model(str(source))
    if is_in_store(str(source)):
        return load_store(str(source), device=device, dtype=dtype)
    folder = Path(source)
    if (folder / "config.json").is_file():
        return load_folder(folder, device=device, dtype=dtype)
    if folder.is_dir() and not (folder / "recipe.json").is_file():
        raise ModelError(f"{source} has no config.json", hint="name a Hugging Face folder or a run")
    ref, step = split_ref(runs_root(runs), str(source))
    run = RunFolder(folder) if (folder / "recipe.json").is_file() else find_run(runs_root(runs), ref)
    return load_run(run, find_checkpoint(run.checkpoints, step), device=device, dtype=dtype)


def load_folder(folder: Path, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a Hugging Face folder."""
    model, config = read_model(folder), _settings(folder / "config.json")
    _refuse_other_kinds(model, str(folder))
    place = _device(device)
    module = _empty(model, place, _dtype(dtype, stored_dtype(config), place))
    load_into(module, folder)
    loaded = LoadedModel(folder.resolve().name, module.eval(), place, model.vocabulary, _length(config, model))
    loaded.base_digest = partial(base_digest, str(folder), model)
    return _with_text(loaded, folder, folder / "tokenizer.json", None)


def load_run(
    run: RunFolder, checkpoint: Path | OpenCheckpoint, *, device: str = "auto", dtype: str = "auto"
) -> LoadedModel:
    """Load a checkpoint of a run."""
    recipe = read_recipe(run)
    _refuse_other_kinds(recipe.model, run.name)
    source = checkpoint if isinstance(checkpoint, OpenCheckpoint) else open_checkpoint(checkpoint)
    place = _device(device if recipe.train.device != "cpu" else "cpu")
    module = _filled(recipe, source, str(checkpoint)).to(place)
    if recipe.model.class_ is None:  # another's buffers may be of any type
        module = module.to(_dtype(dtype, recipe.train.dtype, place))
    vocabulary = recipe.model.vocabulary if recipe.model.class_ is None else _tokenizer_size(run)
    name = f"{run.name}@{source.manifest.step}"
    loaded = LoadedModel(name, module.eval(), place, vocabulary, _run_length(recipe, run), step=source.manifest.step)
    loaded.base_digest = partial(checkpoint_digest, source)
    return _with_text(loaded, run.companions, run.tokenizer_file, _end_of_text(run))


def _refuse_other_kinds(model: Model, name: str) -> None:
    """Raise ModelError for a model that predicts no tokens."""
    if isinstance(model, DiffusionModel):
        raise ModelError(
            f"{name} is a diffusion model, which generates images or video and no text",
            hint="headway sample RUN --label N or --prompt TEXT, with --out FILE",
        )
    if model.reward:
        raise ModelError(
            f"{name} is a reward model, which gives a text a score and predicts no tokens",
            hint="headway checkpoint export makes a folder for transformers' AutoModelForSequenceClassification",
        )


def load_store(address: str, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a checkpoint of a run that uploads to an object store: weights are read from there, nothing is kept."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import list_remote

    url, step = split_address(address)
    store = open_store(url)
    names = [item.key.removeprefix(f"{RUN_FILES}/") for item in store.list(RUN_FILES)]
    steps = [entry.step for entry in list_remote(store)]
    if "recipe.json" not in names or not steps:
        raise RunError(f"there is no run with a checkpoint at {url}", hint="for example s3://bucket/RUN, or @STEP")
    if step is not None and step not in steps:
        raise RunError(f"{url} has no checkpoint of step {step}", hint=f"it has {', '.join(map(str, steps))}")
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / url.rpartition("/")[2])
        for name in filter(_FILE_OF_RUN.fullmatch, names):
            path = run.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.get(f"{RUN_FILES}/{name}"))
        checkpoint = open_address(address_in_store(url, max(steps) if step is None else step))
        return load_run(run, checkpoint, device=device, dtype=dtype)


def live_model(decoder: Decoder, tokenizer: TextTokenizer | None = None, *, name: str = "live") -> LoadedModel:
    """Return a model that a trainer in this process holds: the engine reads the trainer's own weights."""
    parameter = next(decoder.parameters())
    longest = decoder.model.longest or DEFAULT_LENGTH
    loaded = LoadedModel(name, decoder, parameter.device, decoder.model.vocabulary, longest, tokenizer)
    if tokenizer is not None:
        loaded.vocabulary = min(loaded.vocabulary, tokenizer.vocab_size)
        loaded.end_ids = (tokenizer.end_of_text,) if tokenizer.end_of_text >= 0 else ()
    return loaded


def live_run(module: nn.Module, recipe: Recipe, run: RunFolder, device: torch.device) -> LoadedModel:
    """Return the model of a run that trains in this process, with the run's tokenizer and chat template."""
    vocabulary = recipe.model.vocabulary if recipe.model.class_ is None else _tokenizer_size(run)
    loaded = LoadedModel(run.name, module, device, vocabulary, _run_length(recipe, run))
    return _with_text(loaded, run.companions, run.tokenizer_file, _end_of_text(run))


def copy_into(module: nn.Module, weights: Mapping[str, Tensor], *, keep: bool = False) -> Callable[[], None]:
    """Return a function that copies weights into a module in place; with `keep`, theirs as they are now."""
    own = dict(module.named_parameters())
    unknown, missing = sorted(weights.keys() - own.keys()), sorted(own.keys() - weights.keys())
    if unknown or missing:
        which = f"{unknown[0]} is not in the model" if unknown else f"{missing[0]} is missing"
        raise ModelError(f"these weights are not the model's: {which}")
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise ModelError(f"{name} has shape {tuple(weight.shape)}, the model's {tuple(own[name].shape)}")
    values = {name: weight.detach().clone() if keep else weight for name, weight in weights.items()}

    @torch.no_grad()
    def change() -> None:
        for name, parameter in own.items():
            parameter.copy_(values[name])

    return change


def _filled(recipe: Recipe, source: OpenCheckpoint, name: str) -> nn.Module:
    """Return the recipe's model with a checkpoint's weights."""
    if recipe.model.class_ is not None:
        module = build_own(recipe.model, "cpu")
        load_weights(source, module)
        return module
    if recipe.lora is not None:
        return _merged(recipe, recipe.lora, source)
    weights = read_tensors(source, prefix="model/")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != recipe.model.tensors() | recipe.model.buffers():
        raise ModelError(f"{name} does not match the model in the run's recipe")
    decoder = empty_decoder(recipe.model)
    decoder.load_state_dict(weights)
    return decoder


def _merged(recipe: Recipe, lora: Lora, source: OpenCheckpoint) -> Decoder:
    """Return the base of a run with adapters, with those of a checkpoint added to its weights."""
    assert recipe.model.init is not None, "adapters have a base"
    check_base(lora, recipe.model)
    decoder = empty_decoder(recipe.model)
    if (Path(recipe.model.init) / "config.json").is_file():
        load_into(decoder, Path(recipe.model.init))
    else:
        load_weights(open_address(recipe.model.init), decoder)
    merge_into(decoder, adapter_of_run(source, recipe.model, lora))
    return decoder


def _empty(model: Model, device: torch.device, dtype: torch.dtype) -> Decoder:
    return empty_decoder(model, device).to(dtype)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError("no GPU here", hint="leave --device out, or set it to cpu")
    return torch.device(name)


def _dtype(name: str, stored: Any, device: torch.device) -> torch.dtype:
    """Return the precision: as stored or trained on a GPU, float32 on a CPU, unless told otherwise."""
    if name == "auto":
        name = stored if device.type == "cuda" and stored in ("bfloat16", "float16") else "float32"
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"unknown precision {name!r}", hint="float32, bfloat16 or float16")
    return dtype


# -- text


def _with_text(loaded: LoadedModel, folder: Path, tokenizer_file: Path, end_of_text: int | None) -> LoadedModel:
    """Add the tokenizer and what the files beside it say."""
    config, generation = _settings(folder / "config.json"), _settings(folder / "generation_config.json")
    named = _settings(folder / "tokenizer_config.json")
    end_ids = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if end_of_text is not None and end_of_text not in end_ids:
        end_ids = (end_of_text, *end_ids)
    if tokenizer_file.is_file():
        loaded.tokenizer = _tokenizer(tokenizer_file, end_ids)
        loaded.vocabulary = min(loaded.vocabulary, loaded.tokenizer.vocab_size)
        if not end_ids and loaded.tokenizer.end_of_text >= 0:
            end_ids = (loaded.tokenizer.end_of_text,)
    loaded.end_ids = tuple(token for token in end_ids if token < loaded.vocabulary)
    begin = _ids(generation.get("bos_token_id")) or _ids(config.get("bos_token_id"))
    loaded.begin_id = begin[0] if begin and named.get("add_bos_token") else None
    if generation.get("do_sample", True):
        loaded.defaults = {key: generation[key] for key in GENERATION_DEFAULTS if generation.get(key) is not None}
    loaded.chat_template = read_chat_template(folder, named)
    loaded.special_tokens = special_token_names(named)
    return loaded


def _tokenizer(file: Path, end_ids: tuple[int, ...]) -> TextTokenizer:
    """Load a tokenizer that parses special tokens, as a chat template writes them."""
    try:
        return load_tokenizer(file, end_of_text=end_ids[0] if end_ids else None, special_tokens=True)
    except DataError:
        if end_ids:
            raise
        return load_tokenizer(file, end_of_text=-1, special_tokens=True)  # a text then ends at max_tokens


def _settings(file: Path) -> dict[str, Any]:
    """Return a JSON object from a file; an absent one is empty."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)


# -- sizes


def _length(config: dict[str, Any], model: Model) -> int:
    """Return the longest sequence of a model."""
    longest = model.longest or config.get("max_position_embeddings") or config.get("n_positions")
    return int(longest) if longest else DEFAULT_LENGTH


def _run_length(recipe: Recipe, run: RunFolder) -> int:
    """Return the longest sequence of a run's model: what its export would say."""
    return longest_sequence(recipe.model, recipe.data.seq, _settings(run.companions / "config.json"))


def _end_of_text(run: RunFolder) -> int | None:
    """Return the token that ends a document of the run's dataset; a run without data has none."""
    if not run.data_file.is_file():
        return None
    try:
        return int(json.loads(run.data_file.read_bytes())["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{run.data_file} is not a valid dataset manifest") from None


def _tokenizer_size(run: RunFolder) -> int:
    if not run.tokenizer_file.is_file():
        raise RunError(f"{run.name} has no tokenizer", hint="a class of your own needs one to be sampled")
    return load_tokenizer(run.tokenizer_file, end_of_text=0).vocab_size
