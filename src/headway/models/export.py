"""A checkpoint's weights as a Hugging Face folder; run as a process: `python -m headway.models.export`.

Reads one JSON object on standard input, {"checkpoint", "recipe", "tokenizer" or null, "folder"}, and writes one
on standard output: {"folder", "step", "tensors", "digest"}, or {"error", "hint"} with exit status 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headway.errors import HeadwayError, ModelError
from headway.models.huggingface import write_folder
from headway.recipe import Recipe
from headway.state import open_checkpoint
from headway.state.tensors import read_tensors
from headway.track import RunFolder, read_recipe

__all__ = ["export"]


def export(checkpoint: Path, recipe: Recipe, tokenizer: Path | None, folder: Path) -> dict[str, Any]:
    """Write the folder; says what went into it."""
    if recipe.model.class_ is not None:
        raise ModelError(
            f"{recipe.model.class_} has no form that transformers would open: only Headway's own decoders are exported",
            hint="a checkpoint's files are safetensors, and headway.state.tensors.read_tensors reads whole tensors",
        )
    opened = open_checkpoint(checkpoint)
    tensors = read_tensors(opened, "model/")
    write_folder(folder, recipe.model, tensors, tokenizer, seq=recipe.data.seq)
    manifest = opened.manifest
    return {"folder": str(folder), "step": manifest.step, "tensors": len(tensors), "digest": manifest.digest}


def main() -> int:
    """Serve one request."""
    request = json.load(sys.stdin)
    try:
        answer = export(
            Path(request["checkpoint"]),
            read_recipe(RunFolder(Path(request["recipe"]).parent)),
            Path(request["tokenizer"]) if request["tokenizer"] else None,
            Path(request["folder"]),
        )
    except HeadwayError as error:
        answer = {"error": error.message, "hint": error.hint}
    except SafetensorError as error:
        answer = {"error": f"{request['folder']}: {error}", "hint": "is the disk full?"}
    except OSError as error:
        answer = {"error": f"{error.filename or request['folder']}: {error.strerror or error}", "hint": None}
    print(json.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
