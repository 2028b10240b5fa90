"""Losses and gradients by TRL's own trainers, written as folders of weights. Run by test_against_trl.py in TRL's
environment:

    python trl_losses.py WORK

WORK has a model folder and work.json: named cases with a method, its settings and batches of token ids.
"""

import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

PAD = 0


class PairsOfIds(DPOTrainer):
    """Takes pairs that are token ids already."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


class AnswersOfIds(KTOTrainer):
    """Takes answers that are token ids already."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


def main(work: Path) -> None:
    """Compute all cases."""
    content = json.loads((work / "work.json").read_text())
    values = {}
    for name, case in content.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        model.train()
        loss = {"sft": sft, "dpo": dpo, "orpo": orpo, "simpo": simpo, "kto": kto}[case["method"]](model, work, case)
        values[name] = float(loss)
        folder = work / name
        folder.mkdir()
        shutil.copy(work / "model" / "config.json", folder)
        gradients = {key: parameter.grad.contiguous() for key, parameter in model.named_parameters()}
        save_file(gradients, folder / "model.safetensors", metadata={"format": "pt"})
    (work / "losses.json").write_text(json.dumps(values))


def common(work: Path) -> dict:
    return {"output_dir": str(work / "out"), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1,
            "gradient_checkpointing": False}  # fmt: skip


def tokenizer():
    words = Tokenizer(WordLevel({"<pad>": PAD, "<end>": 1, "<none>": 2}, unk_token="<none>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<none>"
    )


def sft(model, work, case):
    """Completions only, padded or packed without padding; the loss is the mean over all labels of all batches."""
    rows = [
        {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
        for prompt, answer, *_ in case["batches"][0]
    ]
    config = SFTConfig(**common(work), packing=case["packing"], max_length=64, per_device_train_batch_size=len(rows))
    trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    count = sum(len(answer) for _, answer, *_ in case["batches"][0])
    total = torch.zeros(())
    for batch in trainer.get_train_dataloader():
        loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(count))
        loss.backward()
        total += loss.detach()
    return total


def dpo(model, work, case):
    """The mean over pairs."""
    rows = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, "ref_chosen_logps": values[0],
         "ref_rejected_logps": values[1]}
        for prompt, chosen, rejected, values in case["batches"][0]
    ]  # fmt: skip
    without = [{key: row[key] for key in ("prompt_ids", "chosen_ids", "rejected_ids")} for row in rows]
    config = DPOConfig(
        **common(work), loss_type=[case["loss"]], beta=case["beta"], precompute_ref_log_probs=True, max_length=None
    )
    trainer = PairsOfIds(model, args=config, train_dataset=Dataset.from_list(without), processing_class=tokenizer())
    loss = trainer.compute_loss(model, trainer.data_collator(rows))
    loss.backward()
    return loss.detach()


def kto(model, work, case):
    """The mean over the answers of each batch, weighted by their numbers."""
    count = sum(len(batch) for batch in case["batches"])
    rows = [
        [
            {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label,
             "ref_logps": values[0], "ref_KL_logps": values[1]}
            for prompt, answer, other, values, label in batch
        ]
        for batch in case["batches"]
    ]  # fmt: skip
    keys = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
    without = [{key: row[key] for key in keys} for batch in rows for row in batch]
    config = KTOConfig(
        **common(work), beta=case["beta"], undesirable_weight=case["undesirable_weight"], max_length=None,
        precompute_ref_log_probs=True, per_device_train_batch_size=len(without),
    )  # fmt: skip
    trainer = AnswersOfIds(model, args=config, train_dataset=Dataset.from_list(without), processing_class=tokenizer())
    total = torch.zeros(())
    for batch in rows:
        loss = trainer.compute_loss(model, trainer.data_collator(batch)) * len(batch) / count
        loss.backward()
        total += loss.detach()
    return total


def concatenated(case) -> dict[str, torch.Tensor]:
    """Padded pairs, as the collators of ORPO and CPO make them."""
    batch = {}
    for index, name in ((1, "chosen"), (2, "rejected")):
        ids = [pair[0] + pair[index] for pair in case["batches"][0]]
        longest = max(map(len, ids))
        batch[f"{name}_input_ids"] = torch.tensor([row + [PAD] * (longest - len(row)) for row in ids])
        batch[f"{name}_attention_mask"] = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        batch[f"{name}_labels"] = torch.tensor([
            [-100] * len(pair[0]) + pair[index] + [-100] * (longest - len(pair[0]) - len(pair[index]))
            for pair in case["batches"][0]
        ])  # fmt: skip
    return batch


def bare(cls, **attributes):
    """A trainer without its preparation of texts: only its functions are used."""
    trainer = object.__new__(cls)
    shared = {"accelerator": Accelerator(cpu=True), "is_encoder_decoder": False, "aux_loss_enabled": False,
              "_stored_metrics": defaultdict(lambda: defaultdict(list))}  # fmt: skip
    for name, value in {**shared, **attributes}.items():
        setattr(trainer, name, value)
    return trainer


def orpo(model, _, case):
    """TRL's loss; or, with `answers`, its odds ratio and the cross-entropy of the answers."""
    trainer = bare(ORPOTrainer, beta=case["beta"], padding_value=PAD)
    batch = concatenated(case)
    if case["answers"]:
        chosen, rejected, logits, *_ = trainer.concatenated_forward(model, batch)
        labels = batch["chosen_labels"][:, 1:]
        logits = logits[:, : labels.shape[1]]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = nll - trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    else:
        loss, _ = trainer.get_batch_loss_metrics(model, batch)
    loss.backward()
    return loss.detach()


def simpo(model, _, case):
    """`CPOTrainer` with loss_type simpo, and cpo_alpha 0: without cross-entropy."""
    trainer = bare(
        CPOTrainer, beta=case["beta"], simpo_gamma=case["margin"], loss_type="simpo", cpo_alpha=0.0, alpha=0.0,
        label_smoothing=0.0, pad_token_id=PAD,
    )  # fmt: skip
    loss, _ = trainer.get_batch_loss_metrics(model, concatenated(case))
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
