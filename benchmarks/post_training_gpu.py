"""Fine-tuning on one GPU: Headway beside TRL, on the same conversations with random weights.

    python benchmarks/post_training_gpu.py [--only sft lora dpo] [--out FILE] [--rounds 2] [--budget 450]
    python benchmarks/post_training_gpu.py --tiny --device cpu     # same weights on both sides: compares their losses
    python benchmarks/post_training_gpu.py --rehearse --device cpu     # all ways with a tiny model

    sft     full fine-tuning of the 1B shape, conversations packed to 4,096 tokens, loss on answers
    lora    adapters of rank 16 on all linear layers of the 8B shape, packed to 4,096; both sides recompute the same
    dpo     the 1B shape on pairs, log-probabilities of the reference computed before the first step on both sides

Every way of a part runs in a process of its own; rounds take turns, and the table has medians. Headway runs the
trainer's own reader, feed, passes and optimizer on a dataset in its format; TRL runs `SFTTrainer` and `DPOTrainer`,
timed between their steps. Tokens are those of conversations, without padding. "defaults" is TRL with nothing set but
what defines the work (packing, lengths, batch, precomputed reference); the other ways of TRL are its best settings:
bfloat16 weights, no checkpointing, fused AdamW, no logging, either attention, Liger's layers if they are installed. A
way that does not fit is run again with half as many rows a pass. A way that fails is named, and the others go on.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from post_training.headway_side import headway
from post_training.stopwatch import Stopwatch
from post_training.table import best_of_trl, by_way, line, print_table, ratios, same_losses
from post_training.trl_side import trl
from post_training.work import WARM, WORKS, Way, conversations, model_of, uses_liger, ways_of, work_of, write_weights

PACKAGES = (
    "torch", "triton", "transformers", "trl", "datasets", "pyarrow", "pandas", "accelerate", "peft", "liger-kernel"
)  # fmt: skip
NEEDED = {"trl": ("trl", "transformers", "accelerate", "datasets", "pyarrow", "pandas"), "lora": ("peft",)}


def main() -> None:
    """Run the ways, print a table; or, as a child, run one way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--ways", nargs="*", help="Names of ways; by default all.")
    parser.add_argument("--rounds", type=int, default=2, help="Of each side's best way and of the defaults.")
    parser.add_argument("--budget", type=float, default=450, help="Seconds after which no more processes start.")
    parser.add_argument("--limit", type=float, default=150, help="Seconds that one process may take.")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="Settings of Headway's recipe.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--check", action="store_true", help="Only say what is installed.")
    parser.add_argument("--one", nargs=2, metavar=("PART", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, way = options.one[0], Way(*json.loads(options.one[1]))
        try:
            result = measured(part, way, options)
        except Exception as error:
            traceback.print_exc(limit=-4)
            full = isinstance(error, torch.OutOfMemoryError)
            result = {"error": "out of memory" if full else f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(result), flush=True)
        return
    versions = {name: version_of(name) for name in PACKAGES}
    print("  ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items()), flush=True)
    if options.check:
        return
    results = list[dict[str, Any]]()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        for part in options.only:
            run_part(part, options, results, began)
            if options.out:
                about = {"versions": versions, "command": sys.argv, "seconds": time.perf_counter() - began}
                if options.device == "cuda" and torch.cuda.is_available():
                    about["device"] = torch.cuda.get_device_name()
                summary = {name: ratios(name, results) for name in options.only}
                options.out.write_text(json.dumps({**about, "ratios": summary, "results": results}, indent=1) + "\n")
    print()
    for part in options.only:
        print_table(part, results)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.tiny:
        same = {part: same_losses(part, results) for part in options.only}
        sys.exit(0 if all(same.values()) else 1)


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_part(part: str, options: argparse.Namespace, results: list[dict[str, Any]], began: float) -> None:
    """All ways once; then, in turns, the best of each side and the defaults."""
    if options.tiny:
        write_weights(part, options.work)
    ways = [way for way in ways_of(part, options.tiny) if options.ways is None or way.name in options.ways]
    for way in ways:
        best = best_of_trl(by_way(part, results), recomputing=False)
        if part == "lora" and way.recompute and way.side == "trl" and best and not way.name.startswith(best):
            continue  # the other attention was faster
        results.append(in_a_process(part, way, options, began))
    for number in range(1, 1 if options.tiny else options.rounds):
        repeated = [way for way in ways if way.name in repeated_names(part, results)]
        for way in repeated if number % 2 else repeated[::-1]:
            results.append(in_a_process(part, way, options, began))


def repeated_names(part: str, results: list[dict[str, Any]]) -> set[str]:
    """Headway's ways, the best of TRL for each of them, and its defaults."""
    medians = by_way(part, results)
    best = {best_of_trl(medians, again) for again in (False, True)}
    return {name for name in medians if not name.startswith("trl") or name == "trl defaults"} | (best - {None})


def in_a_process(part: str, way: Way, options: argparse.Namespace, began: float) -> dict[str, Any]:
    """One way, by a process of its own; with half as many rows a pass while it does not fit."""
    about = {"part": part, "way": way.name}
    missing = missing_packages(part, way)
    if missing:
        result = {**about, "error": f"not installed: {', '.join(missing)}"}
        print(line(result), flush=True)
        return result
    microbatch = way.microbatch or WORKS[part].rows
    while True:
        left = options.budget - (time.perf_counter() - began)
        if left <= 0:
            result = {**about, "error": "skipped: the budget of time is spent"}
            break
        words = [sys.executable, __file__, "--one", part, json.dumps(way._replace(microbatch=microbatch))]
        words += ["--work", str(options.work), "--device", options.device, "--set", *options.set]
        words += [flag for flag, wanted in (("--tiny", options.tiny), ("--rehearse", options.rehearse)) if wanted]
        start = time.perf_counter()
        try:
            most = min(options.limit, left + 30)
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, timeout=most)
            texts = [text for text in done.stdout.splitlines() if text.startswith("{")]
            result = json.loads(texts[-1]) if texts else {"error": f"exit status {done.returncode}"}
        except subprocess.TimeoutExpired:
            result = {"error": f"took more than {most:.0f} s"}
        result = {
            **about,
            "microbatch": microbatch,
            "liger": way.liger and uses_liger(way, options),
            "process_s": time.perf_counter() - start,
            **result,
        }
        full, liger = result.get("error") == "out of memory", way.liger and uses_liger(way, options)
        if "error" not in result or (full and microbatch == 1) or (not full and not liger):
            break
        print(line(result), flush=True)
        if full:
            microbatch //= 2
        else:
            way = way._replace(liger=False)
    print(line(result), flush=True)
    return result


def missing_packages(part: str, way: Way) -> list[str]:
    """What a way needs and is not installed."""
    if way.side == "headway":
        return []
    needed = (*NEEDED["trl"], *(NEEDED["lora"] if WORKS[part].lora else ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


def measured(part: str, way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Times, rates and losses of one way."""
    work, model = work_of(part, options), model_of(part, options.tiny or options.rehearse)
    chats = conversations(work, model.vocabulary)
    watch = Stopwatch(0 if options.tiny else WARM, work.steps, torch.device(options.device))
    run = headway if way.side == "headway" else trl
    steps = run(work, model, chats, way, options, watch)
    tokens_s, pairs_s = (watch.rate([step[column] for step in steps]) for column in (0, 1))
    rates = {"step_s": statistics.median(watch.times), "tokens_s": tokens_s, "pairs_s": pairs_s}
    about = {"times_s": watch.times, "gib": watch.gib, "first_s": watch.first_s, "tokens": steps[-1].tokens}
    return {**rates, **about, "loss": statistics.mean(watch.losses), "losses": watch.losses if options.tiny else []}


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HOME", tempfile.gettempdir() + "/headway-benchmark-hub")
    main()
