"""`python -m headway.inference.sample`: the process behind `headway sample`.

Reads one request, a JSON object, from stdin. Streams JSON lines to stdout: pieces of text
{"prompt_index", "text"}, or on an error a last {"error", "hint"} and the error's exit status.
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


class SampleRequest(BaseModel):
    """Prompts, weights and sampling options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    """The run's folder."""
    checkpoint: Path
    """One of its checkpoints."""
    prompts: list[str]
    """Prompts; an empty one starts a document."""
    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def sample(request: SampleRequest) -> Iterator[dict[str, Any]]:
    """Yield pieces of text, prompt by prompt."""
    run = RunFolder(request.run)
    recipe = read_recipe(run)
    if recipe.model.class_ is not None:
        raise ModelError(
            f"{run.name} trains {recipe.model.class_}, but only built-in model families can be sampled",
            hint="read the weights in your own program with headway.state.tensors.read_tensors",
        )
    tokenizer = _tokenizer(run)
    device = _device(recipe)
    decoder = _decoder(recipe, request.checkpoint, device)
    for index, prompt in enumerate(request.prompts):
        prompt_ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
        with _precision(recipe, device):
            ids = generate_ids(
                decoder,
                prompt_ids,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_k=request.top_k,
                seed=request.seed,
                stop_id=tokenizer.end_of_text,
                vocab_size=tokenizer.vocab_size,
            )
            for text in text_pieces(ids, tokenizer.decode, before=prompt_ids):
                yield {"prompt_index": index, "text": text}


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    try:
        request = SampleRequest.model_validate_json(sys.stdin.buffer.read())
        for piece in sample(request):
            print(json.dumps(piece), flush=True)
    except HeadwayError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return error.exit_status
    return 0


def _tokenizer(run: RunFolder) -> TextTokenizer:
    """Return the tokenizer of the run's dataset, with its end-of-text token."""
    try:
        end_of_text = int(json.loads(run.data_file.read_bytes())["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{run.data_file} is not a valid dataset manifest") from None
    return load_tokenizer(run.tokenizer_file, end_of_text=end_of_text)


def _device(recipe: Recipe) -> torch.device:
    wanted = recipe.train.device
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _precision(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context: the training precision on a GPU, float32 on a CPU."""
    enabled = device.type == "cuda" and recipe.train.dtype == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _decoder(recipe: Recipe, checkpoint: Path, device: torch.device) -> Decoder:
    """Return the recipe's decoder with the checkpoint's weights."""
    weights = read_tensors(checkpoint, prefix="model/")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != recipe.model.tensors() | recipe.model.buffers():
        raise ModelError(f"{checkpoint} does not match the model in the run's recipe")
    decoder = empty_decoder(recipe.model, device)
    decoder.load_state_dict(weights)
    return decoder.eval()


if __name__ == "__main__":
    sys.exit(main())
