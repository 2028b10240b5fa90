"""TRL's side: `SFTTrainer` or `DPOTrainer`, timed between their steps."""

import argparse
import dataclasses
import statistics
import sys
from typing import Any

import numpy as np
import torch

from post_training.stopwatch import Stopwatch
from post_training.work import END, PAD, Conversation, StepSize, Way, Work, draw, rate, uses_liger


def trl(
    work: Work, model: Any, chats: list[Conversation], way: Way, options: argparse.Namespace, watch: Stopwatch
) -> list[StepSize]:
    """`SFTTrainer` or `DPOTrainer`; returns the sizes of steps."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class PreparedPairs(DPOTrainer):  # type: ignore[misc]
        """Takes pairs that are token ids already."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    policy = transformers_model(model, work, way, options)
    dpo = work.kind == "dpo"
    settings: dict[str, Any] = {
        "output_dir": str(options.work / "trl"), "max_steps": watch.total, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "seed": 0, "dataloader_drop_last": not options.tiny,
    }  # fmt: skip
    if dpo:
        dataset = Dataset.from_dict({
            "prompt_ids": [chat.prompt.tolist() for chat in chats],
            "chosen_ids": [chat.answers[0].tolist() for chat in chats],
            "rejected_ids": [chat.answers[1].tolist() for chat in chats],
            "length": [len(chat.prompt) + max(len(answer) for answer in chat.answers) for chat in chats],
        })  # fmt: skip
        settings |= {"max_length": 1024, "precompute_ref_log_probs": True}
        lengths = [sum(len(chat.prompt) + len(answer) for answer in chat.answers) for chat in chats]
        wanted = work.rows * work.seq * 0.98 / statistics.mean(lengths)  # pairs of Headway's step
        passes = 1 if options.tiny else max(1, 2 * work.rows // (way.microbatch or work.rows))
        settings["per_device_train_batch_size"] = len(chats) if options.tiny else max(1, round(wanted / passes))
        settings["gradient_accumulation_steps"] = passes
    else:
        inputs = [np.concatenate([chat.prompt, chat.answers[0]]).tolist() for chat in chats]
        labels = [[-100] * len(chat.prompt) + chat.answers[0].tolist() for chat in chats]
        dataset = Dataset.from_dict({"input_ids": inputs, "labels": labels})
        settings |= {"packing": True, "packing_strategy": "bfd", "max_length": work.seq}
        microbatch = 64 if options.tiny else way.microbatch or work.rows
        settings["per_device_train_batch_size"] = microbatch
        settings["gradient_accumulation_steps"] = 1 if options.tiny else work.rows // microbatch
    if not way.defaults:
        settings |= best_settings(work, way, options)
    if options.device == "cpu":
        settings |= {"use_cpu": True, "bf16": False}
    config = known(DPOConfig if dpo else SFTConfig, settings)
    more: dict[str, Any] = {}
    if work.lora and not options.tiny:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer = (PreparedPairs if dpo else SFTTrainer)(
        model=policy, args=config, train_dataset=dataset, processing_class=tokenizer(),
        callbacks=[clock(watch)], **more,
    )  # fmt: skip
    sizes, collate = list[StepSize](), trainer.data_collator

    def counted(examples: list[dict[str, Any]]) -> Any:
        keys = ("chosen_ids", "rejected_ids") if dpo else ("input_ids",)
        ids = [example[key] for example in examples for key in keys]
        prompts = sum(2 * len(example.get("prompt_ids", ())) for example in examples)
        sizes.append(StepSize(sum(map(len, ids)) + prompts, len(examples) if dpo else 0))
        return collate(examples)

    trainer.data_collator = counted
    result = trainer.train()
    if not watch.losses:
        watch.losses = [result.training_loss]
    parts = settings["gradient_accumulation_steps"]
    steps = [sizes[start : start + parts] for start in range(0, watch.total * parts, parts)]
    return [StepSize(sum(size.tokens for size in step), sum(size.pairs for size in step)) for step in steps]


def best_settings(work: Work, way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """TRL's fastest, and the same optimizer as Headway's."""
    settings: dict[str, Any] = {
        "gradient_checkpointing": way.recompute, "optim": "adamw_torch_fused", "learning_rate": rate(work, options),
        "lr_scheduler_type": "constant", "logging_steps": 1 if options.tiny else 10_000,
        "logging_nan_inf_filter": False,
        "bf16": work.lora, "dataloader_num_workers": 0, "dataloader_pin_memory": options.device == "cuda",
    }  # fmt: skip
    # Weights are bfloat16 already: autocast is only for adapters, which PEFT keeps in float32.
    if way.liger and uses_liger(way, options):
        # TRL has a fused head of its own
        heads = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        layers = {"rope": True, "rms_norm": True, "swiglu": True}
        settings |= {"use_liger_kernel": True, "liger_kernel_config": {**heads, **layers}}
    if work.kind == "dpo":
        settings |= {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}
    if way.attention == "flex_attention":
        # It is compiled for one shape: batches of another would compile it again.
        settings["pad_to_multiple_of"] = 512 if work.kind == "dpo" else (way.microbatch or work.rows) * work.seq
    return settings


def known(config: Any, settings: dict[str, Any]) -> Any:
    """A config; settings that this version of the libraries lacks are named and left out."""
    names = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(settings) - names)
    if unknown:
        print(f"{config.__name__} has no {', '.join(unknown)}", file=sys.stderr)
    return config(**{name: value for name, value in settings.items() if name in names})


def clock(watch: Stopwatch) -> Any:
    """A callback that tells a stopwatch of steps, and notes logged losses."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step()

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "loss" in logs:
                watch.losses.append(float(logs["loss"]))

    return Clock()


def transformers_model(model: Any, work: Work, way: Way, options: argparse.Namespace) -> Any:
    """The same shape, with the weights of the folder or drawn on the device."""
    import transformers

    if options.tiny:
        policy = transformers.AutoModelForCausalLM.from_pretrained(options.work / "model", dtype=torch.float32)
        if work.lora:
            from peft import PeftModel

            return PeftModel.from_pretrained(policy, options.work / "adapter", is_trainable=True)
        return policy
    config = transformers.LlamaConfig.from_dict(model.to_config(work.seq))
    config.pad_token_id, config.eos_token_id, config.bos_token_id = PAD, END, None
    full = way.defaults or options.device == "cpu"
    dtype = torch.float32 if full else torch.bfloat16  # what TRL loads by default is float32
    with torch.device(options.device):
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=way.attention)
    draw(policy)
    return policy


def tokenizer() -> Any:
    """The least that a trainer takes: tokens of padding and of the end."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": PAD, "<end>": END, "<none>": 2}, unk_token="<none>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<none>")
