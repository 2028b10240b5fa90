"""A dataset of prompts and recipes of policies that take seconds, for tests of reinforcement learning."""

import json
from pathlib import Path
from typing import Any

from chat_models import CHATML, byte_tokenizer, write_model_folder
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.recipe import Recipe

TINY: dict[str, Any] = {
    "objective": {"kind": "grpo"},
    "rl": {"rewards": ["own_rewards:vowels"], "samples": 4, "max_tokens": 10, "reward_workers": 1},
    "model": {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "init_std": 0.1},
    "data": {"seq": 64, "holdout": 0.2},
    "train": {"steps": 3, "batch": 4, "lr": 1e-2, "warmup_steps": 1, "restarts": 0, "device": "cpu"},
    "checkpoint": {"every_steps": 0, "retry_s": 0},
    "inference": {"exact": True},
}


def prompts_dataset(folder: Path, count: int = 40) -> Path:
    """Build a dataset of short prompts with a field."""
    model = write_model_folder(folder / "model", byte_tokenizer(), CHATML)
    file = folder / "prompts.jsonl"
    rows = ({"prompt": f"{number}+1?", "target": number + 1} for number in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_chat_dataset(folder / "prompts", [file], ChatOptions(model, prompts=True))
    return folder / "prompts"


def policy_recipe(dataset: Path, **sections: dict[str, Any]) -> Recipe:
    """Return a tiny recipe with changes by section."""
    values = {name: {**fields, **sections.pop(name, {})} for name, fields in TINY.items()}
    values["data"]["path"] = str(dataset)
    return Recipe.model_validate({**values, **sections})
