"""The teacher of a distillation, before the first process starts: where it is, and whether it fits the data."""

import json
from pathlib import Path
from typing import Any

from headway.errors import DataError, ModelError, RecipeError, RunError
from headway.recipe import Recipe
from headway.recipe.objective import AnyObjective, Distill
from headway.state import find_checkpoint
from headway.state.address import is_in_store
from headway.state.base_weights import base_digest, model_at
from headway.track import RunFolder, find_run, split_ref
from headway.track.hub import local_model

TOKENIZER = "tokenizer.json"


def resolve_teacher(recipe: Recipe, root: Path) -> AnyObjective:
    """Return the objective with the teacher's full address and digest; raise if it cannot teach on the data."""
    objective = recipe.objective
    if not isinstance(objective, Distill):
        return objective
    address = _address(objective.teacher, root)
    data = Path(next(iter(recipe.data.parts.values())).path)
    check_same_tokenizer(data, address)
    digest = base_digest(str(address), model_at(str(address)))
    return objective.model_copy(update={"teacher": str(address), "digest": digest})


def check_vocabulary(recipe: Recipe) -> None:
    """Raise RecipeError if the teacher has tokens that the student lacks, or fewer than are compared."""
    objective = recipe.objective
    if not isinstance(objective, Distill):
        return
    tokens, own = model_at(objective.teacher).vocabulary, recipe.model.vocabulary
    if tokens > own:
        raise RecipeError(
            f"the teacher's embedding has {tokens} rows, but model.vocab_size is {own}",
            hint=f"--set model.vocab_size={tokens}" if recipe.model.init is None else "a student with as many rows",
        )
    if objective.top_k > tokens:
        raise RecipeError(
            f"objective.top_k is {objective.top_k}, but the teacher has {tokens} tokens",
            hint=f"--set objective.top_k={tokens} compares all of them",
        )


def check_teacher(recipe: Recipe) -> None:
    """Raise ModelError if the teacher of a resumed run is gone, or has other weights than before."""
    objective = recipe.objective
    if not isinstance(objective, Distill):
        return
    if not Path(objective.teacher).is_dir():
        raise ModelError(f"objective.teacher: {objective.teacher} does not exist", hint="put the folder back")
    present = base_digest(objective.teacher, model_at(objective.teacher))
    if objective.digest not in (None, present):
        raise ModelError(
            f"another teacher: the run's has digest {objective.digest}, but {objective.teacher} has {present}",
            hint="put the weights back that the run started with",
        )


def check_same_tokenizer(data: Path, teacher: Path) -> None:
    """Raise DataError if token ids of a dataset do not mean the same to the teacher."""
    file = teacher / TOKENIZER
    if not file.is_file() and not (teacher / "config.json").is_file():
        file = RunFolder(teacher.parent.parent).tokenizer_file
    if not file.is_file():
        raise DataError(
            f"objective.teacher: {teacher} has no {TOKENIZER}", hint="copy the tokenizer.json of its model into it"
        )
    difference = _difference(_tokens(data / TOKENIZER), _tokens(file))
    if difference:
        raise DataError(
            f"objective.teacher: {teacher} has another tokenizer than the data in {data}: {difference}",
            hint=f"build the data with the teacher's: headway data build ... --tokenizer {file}",
        )


def _address(teacher: str, root: Path) -> Path:
    """Return the folder or checkpoint of a teacher."""
    teacher = local_model(teacher)
    if is_in_store(teacher):
        raise ModelError(
            f"objective.teacher = {teacher!r} is in an object store", hint="headway checkpoint export makes a folder"
        )
    if Path(teacher).is_dir():
        return Path(teacher).resolve()
    name, step = split_ref(root, teacher)
    try:
        return find_checkpoint(find_run(root, name).checkpoints, step).resolve()
    except RunError as error:
        raise ModelError(
            f"objective.teacher = {teacher!r} is neither a folder nor a run", hint=error.hint or error.message
        ) from None


def _tokens(file: Path) -> dict[str, Any]:
    """Return what determines the ids of texts: tokens with their ids, and how text is split into them."""
    try:
        content = json.loads(file.read_bytes())
        model, vocabulary = content["model"], content["model"]["vocab"]
        added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read as a tokenizer: {error!r}") from None
    if not isinstance(vocabulary, dict):  # of Unigram: pairs of a token and its score
        vocabulary = dict(enumerate(map(tuple, vocabulary)))
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges") or ()]
    return {"tokens": vocabulary, "added tokens": added, "merges": merges, "kind": model.get("type")}


def _difference(data: dict[str, Any], teacher: dict[str, Any]) -> str | None:
    """Return the first difference of two tokenizers, in words."""
    for key, value in data.items():
        other = teacher[key]
        if value == other:
            continue
        if isinstance(value, dict) and len(value) != len(other):
            return f"{len(other):,} {key} instead of {len(value):,}"
        return f"other {key}"
    return None
