"""A real model through Headway and through transformers: the same greedy text, the same perplexity.

    python benchmarks/smollm2.py FOLDER TEXT --out benchmarks/results/smollm2_cpu.json

FOLDER is a Hugging Face folder (SmolLM2-135M-Instruct was used), TEXT a plain text file (WikiText-2's validation part).
Both run in float32 on the CPU over the same windows.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import transformers
from torch import Tensor

from headway.inference import LLM, LoadedModel, SamplingParams
from headway.models import empty_decoder, load_into
from headway.recipe.huggingface import read_model

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "<|im_start|>user\nWhat is the largest planet?<|im_end|>\n<|im_start|>assistant\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--windows", type=int, default=64, help="0: all of the text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    ours = empty_decoder(read_model(options.folder))
    load_into(ours, options.folder)
    ours.eval()

    same = [greedy(ours, theirs, tokenizer(prompt).input_ids) for prompt in PROMPTS]
    ids = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8")).input_ids)
    rows = ids[: len(ids) // options.seq * options.seq].view(-1, options.seq)
    rows = rows[: options.windows or len(rows)]
    losses = [0.0, 0.0]
    largest = 0.0
    with torch.no_grad():
        for row in rows:
            logits = (ours(row[None]), theirs(row[None]).logits)
            largest = max(largest, float((logits[0] - logits[1]).abs().max()))
            for i, scores in enumerate(logits):
                losses[i] += float(cross_entropy(scores, row))
    count = len(rows) * (options.seq - 1)
    perplexity = [math.exp(loss / count) for loss in losses]
    ratio = perplexity[0] / perplexity[1]
    print(f"greedy text of {len(PROMPTS)} prompts: {sum(same)} the same")
    print(
        f"perplexity over {count:,} tokens: Headway {perplexity[0]:.4f}, transformers {perplexity[1]:.4f} ({ratio:.6f})"
    )
    print(f"largest difference of a logit: {largest:.1e}")
    if options.out is not None:
        facts = {"prompts": len(PROMPTS), "same_text": sum(same), "tokens": count, "seq": options.seq}
        facts |= {"perplexity": {"headway": perplexity[0], "transformers": perplexity[1]}, "largest_logit": largest}
        facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
        options.out.write_text(json.dumps(facts, indent=2) + "\n")


def greedy(ours: torch.nn.Module, theirs: torch.nn.Module, prompt: list[int], count: int = 48) -> bool:
    """Whether both go on alike."""
    vocabulary = theirs.config.vocab_size
    llm = LLM(LoadedModel("ours", ours, torch.device("cpu"), vocabulary, 2048))
    found = llm.generate([prompt], SamplingParams(max_tokens=count, temperature=0))[0].outputs[0].token_ids
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    return found == expected


def cross_entropy(scores: Tensor, row: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores[0, :-1], row[1:], reduction="sum")


if __name__ == "__main__":
    main()
