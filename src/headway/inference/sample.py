"""`python -m headway.inference.sample`: the process behind `headway sample`.

Reads one request, a JSON object, from stdin. Writes JSON lines to stdout as they come: pieces of text
{"prompt_index", "text"}, or, when something is wrong, a last {"error", "hint"} and the error's exit status.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.errors import HeadwayError, ModelError, RunError
from headway.inference.generate import generate_ids, text_pieces
from headway.models import Decoder, empty_decoder
from headway.recipe import Recipe
from headway.state.tensors import read_tensors
from headway.track import RunFolder, read_recipe

__all__ = ["SampleRequest", "main", "sample"]


class SampleRequest(BaseModel):
    """What to continue, with which weights, and how to choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    """The run's folder."""
    checkpoint: Path
    """One of its checkpoints."""
    prompts: list[str]
    """Texts to continue; an empty one starts a document."""
    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def sample(request: SampleRequest) -> Iterator[dict[str, Any]]:
    """Yield pieces of text by prompt, one prompt after the other."""
    run = RunFolder(request.run)
    recipe = read_recipe(run)
    if recipe.model.class_ is not None:
        raise ModelError(
            f"{run.name} trains {recipe.model.class_}: only Headway's own decoders can be sampled from",
            hint="headway.state.tensors.read_tensors reads a checkpoint's weights for a program of your own",
        )
    tokenizer = _tokenizer(run)
    device = _device(recipe)
    decoder = _decoder(recipe, request.checkpoint, device)
    for index, prompt in enumerate(request.prompts):
        ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
        with _precision(recipe, device):
            made = generate_ids(
                decoder,
                ids,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_k=request.top_k,
                seed=request.seed,
                stop_id=tokenizer.end_of_text,
                vocab_size=tokenizer.vocab_size,
            )
            for text in text_pieces(made, tokenizer.decode, before=ids):
                yield {"prompt_index": index, "text": text}


def main() -> int:
    """Answer the request on stdin; returns the exit status."""
    try:
        request = SampleRequest.model_validate_json(sys.stdin.buffer.read())
        for piece in sample(request):
            print(json.dumps(piece), flush=True)
    except HeadwayError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return error.exit_status
    return 0


def _tokenizer(run: RunFolder) -> TextTokenizer:
    """The tokenizer of the run's data, with the end of text that the data was built with."""
    try:
        end_of_text = int(json.loads(run.data_file.read_bytes())["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{run.data_file} is not the manifest of the run's data") from None
    return load_tokenizer(run.tokenizer_file, end_of_text=end_of_text)


def _device(recipe: Recipe) -> torch.device:
    wanted = recipe.train.device
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _precision(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """On a GPU the precision of training; a CPU is as fast in float32."""
    enabled = device.type == "cuda" and recipe.train.dtype == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _decoder(recipe: Recipe, checkpoint: Path, device: torch.device) -> Decoder:
    """The decoder of the recipe with the weights of the checkpoint."""
    weights = read_tensors(checkpoint, prefix="model/")
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != recipe.model.tensors() | recipe.model.buffers():
        raise ModelError(f"{checkpoint} holds another model than the run's recipe describes")
    decoder = empty_decoder(recipe.model, device)
    decoder.load_state_dict(weights)
    return decoder.eval()


if __name__ == "__main__":
    sys.exit(main())
