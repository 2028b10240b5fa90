"""Policy losses by TRL's own trainers, written as folders of gradients. Run by test_policy_against_trl.py in TRL's
environment:

    python trl_policy_losses.py WORK

WORK has a model folder and work.json: named cases with TRL's settings, and answers with advantages and
log-probabilities.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

PAD = 0


def main(work: Path) -> None:
    """Compute all cases."""
    content = json.loads((work / "work.json").read_text())
    values = {}
    for name, case in content["cases"].items():
        model = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        trainer = trainer_of(case, model, work, content)
        model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = "correction" in case
        loss = trainer._compute_loss(model, inputs_of(case, content["answers"]))
        loss.backward()
        values[name] = loss.item()
        folder = work / name
        folder.mkdir()
        shutil.copy(work / "model" / "config.json", folder)
        gradients = {key: parameter.grad.contiguous() for key, parameter in model.named_parameters()}
        save_file(gradients, folder / "model.safetensors", metadata={"format": "pt"})
    (work / "losses.json").write_text(json.dumps(values))


def trainer_of(case: dict, model, work: Path, content: dict):
    """A trainer with a case's settings; its data and reward are not used."""
    words = Tokenizer(WordLevel({"<pad>": PAD, "<end>": 1, "<none>": 2}, unk_token="<none>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<none>"
    )
    trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[
        case["trainer"]
    ]
    count = len(content["answers"])
    config = config_class(
        output_dir=str(work / "out"), use_cpu=True, bf16=False, report_to="none", max_steps=1,
        gradient_checkpointing=False, temperature=content["temperature"], max_completion_length=content["max_tokens"],
        per_device_train_batch_size=count, num_generations=count, gradient_accumulation_steps=1,
        **case["config"],
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "a"}] * count)
    return trainer_class(
        model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip


def inputs_of(case: dict, answers: list[dict]) -> dict[str, torch.Tensor]:
    """A padded batch: prompts to the right, completions to the left."""
    longest = {key: max(len(answer[key]) for answer in answers) for key in ("prompt", "tokens")}

    def right(values: list, fill: float) -> list:
        return values + [fill] * (longest["tokens"] - len(values))

    pad = [longest["prompt"] - len(answer["prompt"]) for answer in answers]
    mask = torch.tensor([right([1] * len(answer["tokens"]), 0) for answer in answers])
    names = ("now" if case.get("on_policy") else "proximal", "behaviour", "reference")
    old, sampled, reference = (torch.tensor([right(answer[key], 0.0) for answer in answers]) for key in names)
    inputs = {
        "prompt_ids": torch.tensor([[PAD] * n + answer["prompt"] for n, answer in zip(pad, answers, strict=True)]),
        "prompt_mask": torch.tensor(
            [[0] * n + [1] * len(answer["prompt"]) for n, answer in zip(pad, answers, strict=True)]
        ),
        "completion_ids": torch.tensor([right(answer["tokens"], PAD) for answer in answers]),
        "completion_mask": mask,
        "advantages": torch.tensor([answer["advantage"] for answer in answers]),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": reference,
        "old_logps": (old * mask).sum(1),
    }
    if case.get("old", True):
        inputs["old_per_token_logps"] = old
    if "correction" in case:
        ratio, limit = (old - sampled).exp(), case["limit"]
        if case["correction"] == "truncate":
            inputs["importance_sampling_ratio"] = ratio.clamp(max=limit)
        else:
            inputs["importance_sampling_ratio"] = ratio.masked_fill((ratio > limit) | (ratio < 1 / limit), 0.0)
    return inputs


if __name__ == "__main__":
    main(Path(sys.argv[1]))
