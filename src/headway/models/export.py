"""A checkpoint's weights as a Hugging Face folder; run as a process: `python -m headway.models.export`.

Reads one JSON object on standard input, {"checkpoint", "recipe", "tokenizer" or null, "folder"}, and writes one
on standard output: {"folder", "step", "tensors", "digest"}, or {"error", "hint"} with exit status 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError
from headway.models.huggingface import write_folder
from headway.recipe import Recipe
from headway.state import open_checkpoint
from headway.state.tensors import read_tensors

__all__ = ["export"]


def export(checkpoint: Path, recipe: Recipe, tokenizer: Path | None, folder: Path) -> dict[str, Any]:
    """Write the folder; says what went into it."""
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
            Recipe.model_validate_json(Path(request["recipe"]).read_bytes()),
            Path(request["tokenizer"]) if request["tokenizer"] else None,
            Path(request["folder"]),
        )
    except HeadwayError as error:
        answer = {"error": error.message, "hint": error.hint}
    except OSError as error:
        answer = {"error": f"{error.filename or request['folder']}: {error.strerror or error}", "hint": None}
    print(json.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
