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
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

RECIPES = Path(__file__).parent.parent / "recipes"
PAD, END = 0, 1
WARM, CHUNKS = 4, 4
TINY_MODEL = {
    "family": "llama", "vocab_size": 512, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128,
    "tie_embeddings": True,
}  # fmt: skip
PACKAGES = (
    "torch", "triton", "transformers", "trl", "datasets", "pyarrow", "pandas", "accelerate", "peft", "liger-kernel"
)  # fmt: skip
NEEDED = {"trl": ("trl", "transformers", "accelerate", "datasets", "pyarrow", "pandas"), "lora": ("peft",)}
TARGETS = {"sft": (1.05, 1.3), "lora": (1.3, None), "dpo": (1.2, None)}
"""Ratios to reach: to the best of TRL, and to its defaults."""


@dataclass(frozen=True)
class Work:
    """What is trained, the same for all ways."""

    recipe: str
    """A file of recipes/ with the shape of the model."""
    kind: str
    """Objective."""
    rows: int
    """Rows of a step."""
    steps: int
    """Timed ones."""
    seq: int = 4096
    lora: bool = False
    answer: tuple[int, int] = (300, 2000)
    """Tokens: median, most."""
    prompt: tuple[int, int] = (150, 1800)


WORKS = {
    "sft": Work("llama3.2-1b.toml", "sft", rows=8, steps=16),
    "lora": Work("llama3-8b.toml", "sft", rows=4, steps=12, lora=True),
    "dpo": Work("llama3.2-1b.toml", "dpo", rows=8, steps=16, answer=(200, 600), prompt=(150, 400)),
}


class Way(NamedTuple):
    """How one side does it."""

    side: str
    name: str
    attention: str = "sdpa"
    recompute: bool = False
    defaults: bool = False
    microbatch: int | None = None
    """Rows of a forward pass; None for a step's. In `dpo` of TRL, half as many pairs as those rows have."""
    liger: bool = True
    """Whether to use Liger's layers, if they are installed."""


class StepSize(NamedTuple):
    """What a step trains on."""

    tokens: float
    pairs: float


class Conversation(NamedTuple):
    """Token ids; of a pair, the second answer is the rejected one."""

    prompt: np.ndarray
    answers: tuple[np.ndarray, ...]


def ways_of(part: str, tiny: bool) -> list[Way]:
    """In the order in which they run."""
    if tiny:
        return [Way("headway", "headway"), Way("trl", "trl sdpa")]
    if part == "sft":
        return [
            Way("headway", "headway"),
            Way("trl", "trl flex", "flex_attention"),
            Way("trl", "trl sdpa", microbatch=1),
            Way("trl", "trl defaults", recompute=True, defaults=True),
        ]
    if part == "lora":
        return [
            Way(side, f"{side}{f' {attention[:4]}' if side == 'trl' else ''}{', recomputing' if again else ''}",
                attention, again, microbatch=1)
            for again in (False, True)
            for side, attention in (("headway", "sdpa"), ("trl", "flex_attention"), ("trl", "sdpa"))
        ]  # fmt: skip
    return [
        Way("headway", "headway"),
        Way("trl", "trl sdpa"),
        Way("trl", "trl flex", "flex_attention"),
        Way("trl", "trl defaults", recompute=True, defaults=True),
    ]


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


def uses_liger(way: Way, options: argparse.Namespace) -> bool:
    """Whether a way would use Liger's layers."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    return way.side == "trl" and not way.defaults and installed and options.device == "cuda"


def missing_packages(part: str, way: Way) -> list[str]:
    """What a way needs and is not installed."""
    if way.side == "headway":
        return []
    needed = (*NEEDED["trl"], *(NEEDED["lora"] if WORKS[part].lora else ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


# -- what is printed


def line(result: dict[str, Any]) -> str:
    """For people."""
    text = f"{result['part']:6}{result['way']:24}"
    if "error" in result:
        return text + result["error"]
    text += f"{result['tokens_s']:10,.0f} tokens/s{result['step_s'] * 1e3:9.1f} ms{result['gib']:8.1f} GiB"
    text += f"{result['pairs_s']:8.1f} pairs/s" if result.get("pairs_s") else ""
    spread = (max(result["times_s"]) - min(result["times_s"])) / result["step_s"]
    text += f"   +-{spread / 2:.1%}  loss {result['loss']:.4f}  {result['microbatch']} rows a pass"
    text += ", liger" if result["liger"] else ""
    return text + f"  first step {result['first_s']:.0f} s, process {result['process_s']:.0f} s"


def by_way(part: str, results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The medians of each way that ran."""
    names = dict.fromkeys(result["way"] for result in results if result["part"] == part and "error" not in result)
    medians = {}
    for name in names:
        runs = [r for r in results if (r["part"], r["way"]) == (part, name) and "error" not in r]
        keys = ("tokens_s", "pairs_s", "step_s", "gib", "loss")
        medians[name] = {key: statistics.median(float(run.get(key) or 0) for run in runs) for key in keys}
        medians[name]["runs"] = len(runs)
    return medians


def best_of_trl(medians: dict[str, dict[str, float]], recomputing: bool) -> str | None:
    """Name of TRL's fastest way, its defaults left out."""
    names = [
        name for name in medians
        if name.startswith("trl") and name != "trl defaults" and name.endswith(", recomputing") == recomputing
    ]  # fmt: skip
    return max(names, key=lambda name: medians[name]["tokens_s"], default=None)


def ratios(part: str, results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of tokens per second and memory: Headway's ways to TRL's, by name."""
    medians = by_way(part, results)
    compared = {}
    for ours in (name for name in medians if not name.startswith("trl")):
        best = best_of_trl(medians, ours.endswith(", recomputing"))
        for theirs in (name for name in (best, "trl defaults") if name in medians):
            compared[f"{ours} / {theirs}"] = {
                "tokens_s": medians[ours]["tokens_s"] / medians[theirs]["tokens_s"],
                "memory": medians[ours]["gib"] / max(medians[theirs]["gib"], 1e-9),
            }
    return compared


def print_table(part: str, results: Sequence[dict[str, Any]]) -> None:
    """Medians and ratios, in Markdown."""
    medians = by_way(part, results)
    print(f"| {part} | tokens/s | pairs/s | step, ms | GiB | runs |\n|---|---|---|---|---|---|")
    for name, row in medians.items():
        pairs = f"{row['pairs_s']:,.1f}" if row["pairs_s"] else ""
        print(f"| {name} | {row['tokens_s']:,.0f} | {pairs} | {row['step_s'] * 1e3:,.1f} | {row['gib']:.1f} "
              f"| {row['runs']:.0f} |")  # fmt: skip
    for result in results:
        if result["part"] == part and "error" in result:
            print(f"{result['way']}: {result['error']}")
    to_best, to_defaults = TARGETS[part]
    for names, row in ratios(part, results).items():
        target = to_defaults if names.endswith("defaults") else to_best
        reach = f"  (to reach: {target})" if target else ""
        print(f"{names}: x{row['tokens_s']:.3f} tokens/s, x{row['memory']:.2f} memory{reach}")
    print()


def same_losses(part: str, results: Sequence[dict[str, Any]]) -> bool:
    """Whether both sides had the same losses, step by step."""
    losses = {r["way"]: r["losses"] for r in results if r["part"] == part and "error" not in r}
    if set(losses) != {"headway", "trl sdpa"}:
        return False
    pairs = list(zip(losses["headway"], losses["trl sdpa"], strict=True))
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    print(f"{part}: losses {', '.join(f'{a:.6f} {b:.6f}' for a, b in pairs)}; relative difference {worst:.1e}")
    return worst < 1e-4


# -- conversations and the model


def work_of(part: str, options: argparse.Namespace) -> Work:
    """The work of a part; with `tiny`, all its rows are one step."""
    work = WORKS[part]
    if options.rehearse:
        return dataclasses.replace(work, steps=4, seq=256, answer=(20, 60), prompt=(15, 50))
    if options.tiny:
        return dataclasses.replace(work, rows=0, steps=4, seq=256, answer=(20, 60), prompt=(15, 50))
    return work


def model_of(part: str, tiny: bool) -> Any:
    """The recipe's model section."""
    from headway.recipe import Model

    if tiny:
        return Model(**{key: value for key, value in TINY_MODEL.items() if key != "family"})
    values = tomllib.loads((RECIPES / WORKS[part].recipe).read_text())["model"]
    return parsed({"model": values, "data": {"path": "none"}}).model


def parsed(values: dict[str, Any], settings: Sequence[str] = ()) -> Any:
    """A recipe."""
    from headway.recipe.load import parse_recipe, with_settings

    return with_settings(parse_recipe(values, {}, "benchmark"), settings)


def conversations(work: Work, vocabulary: int) -> list[Conversation]:
    """More than all steps need, the same on both sides; answers end with a token of their own."""
    rng = np.random.default_rng(7)
    wanted = (work.rows * (WARM + work.steps + 1) or 8) * work.seq
    drawn, tokens = list[Conversation](), 0
    answers = 2 if work.kind == "dpo" else 1

    def text(median: int, most: int, end: bool) -> np.ndarray:
        length = int(np.clip(rng.lognormal(math.log(median), 0.8), 8, most))
        ids = rng.integers(2, vocabulary, length, dtype=np.int64)
        ids[-1] = END if end else ids[-1]
        return ids

    while tokens < wanted:
        drawn.append(Conversation(text(*work.prompt, False), tuple(text(*work.answer, True) for _ in range(answers))))
        tokens += sum(len(drawn[-1].prompt) + len(answer) for answer in drawn[-1].answers)
    return drawn


def write_weights(part: str, folder: Path) -> None:
    """A folder with a tiny model, and one with adapters whose product is not zero."""
    from headway.models import empty_decoder, init_weights, write_folder
    from headway.recipe import Lora
    from headway.recipe.lora import adapted_layers, adapter_tensors
    from headway.state.peft import Adapter, LayerAdapter, write_adapter

    model = model_of(part, tiny=True)
    if not (folder / "model").exists():
        decoder = empty_decoder(model)
        init_weights(decoder, 5)
        write_folder(folder / "model", model, decoder.state_dict())
    if WORKS[part].lora:
        rng, lora = np.random.default_rng(3), Lora(rank=16)
        shapes = adapter_tensors(model, lora)
        layers = {
            layer: LayerAdapter(
                *(rng.normal(0, 0.05, shapes[f"{layer}.{key}"]).astype(np.float32) for key in ("lora_a", "lora_b")),
                lora.scale,
            )
            for layer in adapted_layers(model)
        }
        write_adapter(folder / "adapter", model, Adapter("benchmark", layers))


# -- one way, in this process


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


class Stopwatch:
    """Clocks steps in chunks, the device idle between them, and tells the most memory of all steps."""

    def __init__(self, warm: int, steps: int, device: torch.device) -> None:
        self.warm, self.total, self._chunk, self._device = warm, warm + steps, max(1, steps // CHUNKS), device
        self.times, self.losses = list[float](), list[float]()
        self.first_s = self.gib = 0.0
        self._done = 0

    def start(self) -> None:
        """Before the first step."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._began = self._now()

    def step(self) -> None:
        """After each step."""
        self._done += 1
        timed = self._done - self.warm
        if self._done == 1:
            self.first_s = self._now() - self._began
        if timed == 0 or (timed > 0 and timed % self._chunk == 0):
            now = self._now()
            if timed:
                self.times.append((now - self._began) / self._chunk)
            self._began = self._now()
        if self._done == self.total and self._device.type == "cuda":
            self.gib = torch.cuda.max_memory_allocated() / 2**30

    def rate(self, sizes: Sequence[float]) -> float:
        """The median of chunks, in a second; `sizes` are those of all steps, in order."""
        starts = range(self.warm, self.total - self._chunk + 1, self._chunk)
        amounts = [sum(sizes[start : start + self._chunk]) for start in starts]
        return statistics.median(
            amount / self._chunk / seconds for amount, seconds in zip(amounts, self.times, strict=True)
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# -- Headway


def headway(
    work: Work, model: Any, chats: list[Conversation], way: Way, options: argparse.Namespace, watch: Stopwatch
) -> list[StepSize]:
    """The trainer's own parts; returns the sizes of steps, whose rows are about equally full."""
    from headway.data.corpus import open_corpus
    from headway.models import empty_decoder
    from headway.models.lora import add_adapters, base_names
    from headway.parallel import World, finish_gradients, parallelize_model, total_norm
    from headway.parallel.objective import SumScale, loss_of
    from headway.state.tensors import ModelShare
    from headway.track import RunFolder
    from headway.train.build import draw_weights
    from headway.train.cuda_graphs import passes_of
    from headway.train.feed import DeviceFeed
    from headway.train.objectives import NextToken, make_objective
    from headway.train.objectives.preference import REFERENCE
    from headway.train.objectives.reference import WithReference, reference_column
    from headway.train.optim import build_optimizer, clip, lower, set_step, widen_gradients
    from headway.train.optimizer_in_backward import early_updates

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_dataset(data, chats, model.vocabulary)
        low = {} if options.device == "cpu" else {"dtype": "bfloat16", "weights": "bfloat16"}
        if low and not work.lora:
            low["moments"] = "bfloat16"
        train = {
            "steps": 1000, "batch": work.rows or 1, "lr": rate(work, options), "schedule": "constant",
            "warmup_steps": 0, "weight_decay": 0.0, "beta2": 0.999, "recompute": "full" if way.recompute else "none",
            "device": device.type, **low,
        }  # fmt: skip
        values: dict[str, Any] = {
            "model": model.model_dump(exclude_defaults=True), "train": train, "objective": {"kind": work.kind},
            "data": {"path": str(data), "seq": work.seq, "holdout": 0.0},
        }  # fmt: skip
        if work.lora:
            values["model"]["init"] = "random"
            values["lora"] = {"rank": 16, **({"init": str(options.work / "adapter")} if options.tiny else {})}
        if options.tiny:
            values["model"]["init"] = str(options.work / "model")
            train["batch"] = open_corpus(parsed(values)).packings[0].rows
        elif way.microbatch and way.microbatch < work.rows:
            train["microbatch"] = way.microbatch
        recipe = parsed(values, options.set)
        world = World(0, 1, device)
        corpus = open_corpus(recipe)
        reader, objective = corpus.reader(), make_objective(recipe.objective, corpus.weighted)
        plain = empty_decoder(recipe.model, "meta")
        lower(plain, recipe.train)
        base = frozenset[str]()
        if recipe.lora is not None:
            add_adapters(plain, recipe.lora)
            base = base_names(plain)
        measures: Any = None if isinstance(objective, NextToken) else objective
        spread = parallelize_model(plain, recipe, world, (), measures)
        if spread.accumulates:
            widen_gradients(spread.model)
        held = ModelShare(0, (0,), spread.borrowed, spread.names, base)
        if options.tiny:
            draw_weights(spread.model, recipe, held, RunFolder(Path(folder) / "run"))
        else:
            draw(spread.model)
        if REFERENCE in objective.columns:
            column = reference_column(recipe, corpus, spread, world, lambda *_: None, None)
            reader = WithReference(reader, column)
        optimizer = build_optimizer(spread.model, recipe.train, recipe.seed, world, held, recipe.model.layout)
        parameters = dict(spread.model.named_parameters())
        feed = DeviceFeed(corpus.loader(reader), device, objective)
        passes, early = passes_of(spread, recipe, world), early_updates(spread, optimizer, recipe, world)
        losses, cursor, batch = list[torch.Tensor](), 0, recipe.train.batch
        spread.model.train()
        watch.start()
        for number in range(1, watch.total + 1):
            rows, trained, counts = feed.read(cursor, batch)
            cursor += batch
            scale = SumScale(tuple(1 / (count or 1) for count in counts), 1 / max(1, trained))
            set_step(optimizer.param_groups, number, recipe.train.lr)
            values_K = passes(rows, scale)
            finish_gradients(parameters, spread.missing)
            norm = total_norm(parameters, world, spread.borrowed) if early is None else early.norm(parameters)
            if recipe.train.clip > 0:
                clip(optimizer, parameters.values(), norm, recipe.train.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss_of(values_K, spread.terms).detach().clone())
            watch.step()
        watch.losses = [loss.item() for loss in losses]
        packing = corpus.packings[0]
        share = batch / packing.rows
        return [StepSize(packing.counts.tokens * share, len(chats) * share if work.kind == "dpo" else 0)] * watch.total


def write_dataset(folder: Path, chats: list[Conversation], vocabulary: int) -> None:
    """A dataset of chats or pairs in Headway's format."""
    from headway.data.chat_samples import ASSISTANT
    from headway.data.chat_tokens import EncodedSample
    from headway.data.chat_writer import ChatWriter
    from headway.data.manifest import CHAT_FORMAT, MANIFEST, ChatFacts, DatasetManifest
    from headway.data.writer import write_file

    folder.mkdir()
    writer = ChatWriter(folder, dtype="uint32", shard_tokens=1 << 28)
    for number, chat in enumerate(chats):
        unit = []
        for answer in chat.answers:
            ids = np.concatenate([chat.prompt, answer]).astype(np.uint32)
            spans = [(0, len(chat.prompt), 2, False), (len(chat.prompt), len(ids), ASSISTANT, True)]
            unit.append(EncodedSample([ids], spans, len(ids)))
        writer.add(unit, conversation=number, weight=1.0, desirable=True)
    writer.close()
    files = {name: write_file(folder / name, b"{}") for name in ("chat_template.jinja", "tokenizer_config.json")}
    kind = "pairs" if len(chats[0].answers) == 2 else "chat"
    facts = ChatFacts(kind, len(chats), writer.trained_tokens, tuple(writer.chat_files), *files.values())
    manifest = DatasetManifest(
        "uint32", vocabulary, 0, writer.tokens, writer.documents, writer.prompt_tokens, tuple(writer.files),
        write_file(folder / "tokenizer.json", b"{}"), CHAT_FORMAT, facts,
    )  # fmt: skip
    write_file(folder / MANIFEST, manifest.canonical())


def rate(work: Work, options: argparse.Namespace) -> float:
    """Learning rate: such that a tiny model's losses move."""
    return 2e-3 if options.tiny else (1e-6 if work.kind == "dpo" else 2e-5)


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """Weights as a fresh model has them, on the device; an adapter's product is zero."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.zero_()
        elif parameter.ndim > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)


# -- TRL


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


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HOME", tempfile.gettempdir() + "/headway-benchmark-hub")
    main()
