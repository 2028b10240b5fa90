"""Reinforcement learning on one GPU: a whole step, its parts alone, and TRL beside it, with the same forced lengths.

    python benchmarks/rl_gpu.py [--out FILE] [--only headway "headway, 256 at once" trl "trl, vllm"] [--steps 3]
    python benchmarks/rl_gpu.py --tiny --device cpu        # all ways with a tiny model

GRPO of the Qwen3-0.6B shape with random weights in bfloat16: 64 prompts of 128 tokens, 8 answers each. An answer's
length is forced: a fixed list drawn from U(100, 1024), the same for every step and side; an end of text ends nothing.
The reward looks at an answer's text. A sample is an answer.

Headway runs the trainer's own loop: weights to the sampler, generate, score, train. Beside the whole step: the engine
alone over the same requests, and the training step alone over the same rows, each on an idle device. TRL 1.16 runs
`GRPOTrainer` with transformers' continuous batching, or with vLLM in its process; its packages may lie in a folder on
PYTHONPATH. Every way runs in a process of its own; one that fails is named, and the others go on. The first step of
each is short and not counted. A way that is stopped by --limit, or with this command by SIGTERM, keeps what it has
measured: whole steps, or for how long its timed step had run.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from post_training.trl_side import known
from post_training.work import draw
from post_training_gpu import version_of
from train_gpu import kernels_of

SHAPE: dict[str, Any] = {
    "vocab_size": 151936, "layers": 28, "dim": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "hidden": 3072,
    "rope_theta": 1e6, "norm_eps": 1e-6, "tie_embeddings": True, "qk_norm": True,
}  # fmt: skip
TINY_SHAPE = SHAPE | {
    "vocab_size": 512, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 128
}  # fmt: skip
WAYS = ("headway", "headway, 256 at once", "headway, exact", "trl", "trl, vllm")
DEFAULT_WAYS = ("headway", "headway, 256 at once", "trl", "trl, vllm")
PACKAGES = ("torch", "triton", "transformers", "trl", "vllm", "accelerate", "datasets", "liger-kernel")
NEEDED = {"trl": ("trl", "transformers", "accelerate", "datasets", "pandas")}
TARGETS = {"trl": 10.0, "trl, vllm": 1.5}
"""Samples per second to reach, as a multiple of a peer's."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
PASSED_ON = ("steps", "peer-steps", "parts", "batch-rows", "limit")
"""Options that the process of a way has, too."""
END = 0
REWARD = r"^w\d*[02468] "
"""Whether the first word of an answer has an even number: about half of them."""


@dataclass(frozen=True)
class Work:
    """What a step is, the same for all ways."""

    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 128
    shortest: int = 100
    longest: int = 1024
    shape: str = "qwen3-0.6b"

    @property
    def model(self) -> dict[str, Any]:
        return TINY_SHAPE if self.shape == "tiny" else SHAPE

    @property
    def answers(self) -> int:
        return self.prompts * self.samples

    @property
    def lengths(self) -> list[int]:
        """Of the answers of a step."""
        rng = random.Random(0)
        return [rng.randint(self.shortest, self.longest) for _ in range(self.answers)]

    @property
    def warm_lengths(self) -> list[int]:
        """Of those of the first step."""
        return [max(2, length // 8) for length in self.lengths]

    def prompt(self, number: int) -> str:
        """Words, each of which is a token."""
        rng = random.Random(number)
        return " ".join(f"w{rng.randrange(1, self.model['vocab_size'] - 8)}" for _ in range(self.prompt_tokens))


TINY = Work(prompts=4, samples=4, prompt_tokens=8, shortest=4, longest=20, shape="tiny")


def main() -> None:
    """Run the ways and print a table; or, as a child, run one way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=WAYS, default=DEFAULT_WAYS)
    parser.add_argument("--steps", type=int, default=3, help="Timed steps of Headway.")
    parser.add_argument("--peer-steps", type=int, default=1, help="Timed steps of TRL.")
    parser.add_argument("--parts", type=int, default=2, help="Times that Headway's parts are timed alone; may be 0.")
    parser.add_argument("--limit", type=float, default=280, help="Seconds that one way may take.")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="Settings of Headway's recipe.")
    parser.add_argument("--batch-rows", type=int, default=16, help="Answers of a forward pass of TRL.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path, help="Append a table of kernels of Headway's training step.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        try:
            result = one_way(options.one, options)
        except Exception as error:
            traceback.print_exc(limit=-6)
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(result), flush=True)
        return
    signal.signal(signal.SIGTERM, stop)
    versions = {name: version_of(name) for name in PACKAGES}
    print("  ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items()), flush=True)
    results = list[dict[str, Any]]()
    for name in options.only:
        results.append(in_a_process(name, options))
        print(json.dumps(results[-1])[:600], flush=True)
        if options.out:
            about = {"versions": versions, "command": sys.argv, "work": work_of(options).__dict__}
            if options.device == "cuda":
                about["device"] = torch.cuda.get_device_name()
            options.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
        if results[-1].get("stopped"):
            break
    print_table(results)


class Stopped(Exception):
    """SIGTERM."""


def stop(*_: Any) -> None:
    raise Stopped


def work_of(options: argparse.Namespace) -> Work:
    return TINY if options.tiny else Work()


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One way, by a process of its own, or why not."""
    side = name.split(",")[0]
    missing = [package for package in NEEDED.get(side, ()) if importlib.util.find_spec(package) is None]
    if name.endswith("vllm") and importlib.util.find_spec("vllm") is None:
        missing.append("vllm")
    if missing:
        return {"way": name, "error": f"not installed: {', '.join(missing)}"}
    words = [sys.executable, __file__, "--one", name, "--device", options.device]
    words += [f"--{key}={getattr(options, key.replace('-', '_'))}" for key in PASSED_ON]
    words += ["--profile", str(options.profile)] if options.profile else []
    words += [*(["--tiny"] if options.tiny else []), "--set", *options.set]
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    why, stopped = f"took more than {options.limit:.0f} s", False
    try:
        output, _ = process.communicate(timeout=options.limit)
        why = f"exit status {process.returncode}"
    except (subprocess.TimeoutExpired, Stopped) as error:
        end(process)
        output, _ = process.communicate()
        if isinstance(error, Stopped):
            why, stopped = "stopped by SIGTERM", True
    finally:
        end(process)
    result = {"way": name, "process_s": round(time.perf_counter() - began, 1), **measured(output, why)}
    return result | ({"stopped": True} if stopped else {})


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a process with its children, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def measured(output: str, why: str) -> dict[str, Any]:
    """What a process printed last, and what it failed of; `why` it ended, if it had measured nothing.

    A way of Headway prints its whole step before it times its parts, of which it may fail.
    """
    printed = [row for row in _rows(output) if "timed_since" not in row]
    errors = [row["error"] for row in printed if "error" in row]
    results = [row for row in printed if "error" not in row]
    if not results:
        return {"error": errors[-1] if errors else why, **_least(output)}
    return results[-1] | ({"parts_failed": errors[-1]} if errors else {})


def _least(output: str) -> dict[str, Any]:
    """What is known of a way that was stopped: its timed step had taken so long already."""
    begun = [row["timed_since"] for row in _rows(output) if "timed_since" in row]
    return {"step_s_at_least": time.time() - begun[-1]} if begun else {}


def _rows(output: str) -> list[dict[str, Any]]:
    """The JSON objects that a process printed, a line each; TRL prints its own metrics as Python does."""
    rows = list[dict[str, Any]]()
    for text in output.splitlines():
        if text.startswith('{"'):
            with contextlib.suppress(ValueError):
                rows.append(json.loads(text))
    return rows


def tell_begin() -> None:
    """Print that what follows is timed: it may be stopped by a limit."""
    print(json.dumps({"timed_since": time.time()}), flush=True)


def one_way(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("trl"):
            return trl(work_of(options), options, Path(folder), vllm=name.endswith("vllm"))
        return headway(work_of(options), options, Path(folder), name)


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """In Markdown, with what is to be reached."""
    heads = "way", "step, s", "samples/s", "generate, s", "train, s", "sum of parts alone, s", "step / sum"
    print(f"\n| {' | '.join((*heads, 'sync, ms', 'mismatch', 'GiB'))} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    by_way = {result["way"]: result for result in results if "error" not in result}
    for name, row in by_way.items():
        mismatch = f"{row['mismatches'][-1]:.3g}" if "mismatches" in row else ""
        cells = (
            f"{row['step_s']:.2f}", f"{row['samples_s']:.2f}", _number(row, "generate_s"), _number(row, "train_s"),
            _number(row, "parts_s"), _number(row, "overhead", 3), _number(row, "sync_ms"), mismatch,
            f"{row['gib']:.1f}",
        )  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |")
    exact, sides = by_way.get("headway, exact"), [row for name, row in by_way.items() if name.startswith("headway")]
    ours = [row for row in sides if row is not exact] or sides
    best = max((row["samples_s"] for row in ours), default=None)
    for result in results:
        for key in ("error", "parts_failed"):
            if key in result:
                print(f"{result['way']}: {result[key]}")
        if "step_s_at_least" in result and ours:
            least = result["step_s_at_least"]
            times = least / min(row["step_s"] for row in ours)
            print(f"headway / {result['way']}: more than x{times:.1f}; its step had taken {least:.0f} s when stopped")
    for name, target in TARGETS.items():
        if best is not None and name in by_way:
            print(f"headway / {name}: x{best / by_way[name]['samples_s']:.2f} samples/s  (to reach: {target})")
    if exact is not None and best is not None and len(sides) > 1:
        slower = best / exact["samples_s"]
        print(f"exact / plain: x{slower:.3f} a step  (to reach: 1.08)")


def _number(row: dict[str, Any], key: str, places: int = 2) -> str:
    return f"{row[key]:.{places}f}" if row.get(key) is not None else ""


def clock(device: torch.device) -> float:
    """Now, the device idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer of words, with a template that adds an end: what is timed has texts of a usual size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = {"<|end|>": END} | {f"w{number}": number for number in range(1, vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<|end|>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words with spaces between them
    raw.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(raw.to_str())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}\n')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


# -- Headway


class NoSaves:
    """Stands for the channel to an agent: nothing is saved or requested. It clocks steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends = list[float]()

    def fence(self) -> Any:
        """See SaveClient."""
        return lambda: 0.0

    def full(self) -> bool:
        """See SaveClient."""
        return False

    def take_save_request(self) -> bool:
        """See SaveClient."""
        return False

    def tick(self) -> None:
        """The end of a step; the next one would wait for the device as soon as it samples."""
        self.ends.append(clock(self._device))

    def save(self, *_: Any, **__: Any) -> None:
        """See SaveClient."""

    def finish(self) -> None:
        """See SaveClient."""


def headway(work: Work, options: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """The whole step by the trainer's loop, then its parts alone."""
    from headway.agent import new_run
    from headway.data.chat_build import ChatOptions, build_chat_dataset
    from headway.parallel import World
    from headway.recipe import Assignment
    from headway.recipe.load import parse_recipe, with_settings
    from headway.track import Recorder, read_recipe, record_path
    from headway.track.heartbeat import PAGE, HeartbeatWriter
    from headway.train import answers
    from headway.train.build import build
    from headway.train.loop import train
    from headway.train.stop import StopRequest

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    low = {} if device.type == "cpu" else {"dtype": "bfloat16", "weights": "bfloat16", "moments": "bfloat16"}
    exact = name.endswith("exact")
    write_tokenizer(folder / "model", work.model["vocab_size"])
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": work.prompt(n)}) + "\n" for n in range(work.prompts)))
    build_chat_dataset(folder / "data", [rows], ChatOptions(str(folder / "model"), prompts=True))
    longest = work.prompt_tokens + work.longest + 8
    values: dict[str, Any] = {
        "model": dict(work.model),
        "objective": {"kind": "grpo"},
        "data": {"path": str(folder / "data"), "seq": max(4096, longest) if not options.tiny else 64, "holdout": 0.0},
        "rl": {
            "samples": work.samples, "max_tokens": work.longest,
            "rewards": [{"name": "regex", "args": {"pattern": REWARD, "search": True}}],
        },
        "train": {
            "steps": 1 + options.steps, "batch": work.prompts, "microbatch": 8, "lr": 1e-6, "schedule": "constant",
            "warmup_steps": 0, "weight_decay": 0.0, "device": device.type, **low,
        },
        "checkpoint": {"every_steps": 0},
        "inference": {"exact": exact},
    }  # fmt: skip
    recipe = with_settings(parse_recipe(values, {}, "benchmark"), options.set)
    at_once, params_of, options_of = (
        256 if name.endswith("256 at once") else 512,
        answers.sampling_params,
        answers.EngineOptions,
    )

    # forced lengths, by the place of an answer in its step; and how many of them run at once
    def forced(rl: Any, seed: int, request: Any, **more: Any) -> Any:
        params = params_of(rl, seed, request, **more)
        place, of = request.sample % work.prompts * work.samples + request.answer, lengths["now"]
        return params.model_copy(update={"max_tokens": of[place], "ignore_eos": True})

    lengths = {"now": work.warm_lengths}
    answers.sampling_params = forced
    answers.EngineOptions = lambda **asked: options_of(**{**asked, "max_sequences": at_once, "max_batch_tokens": 8192})

    attempt = new_run(recipe, folder / "runs", workers=1, name="benchmark")
    run, recipe = attempt.folder, read_recipe(attempt.folder)
    torch.set_num_threads(attempt.threads)
    assignment = Assignment(
        run=str(run.path), attempt=1, rank=0, workers=1, device=device.type, threads=attempt.threads, log="",
        rendezvous="", asked_ns=time.monotonic_ns(),
    )  # fmt: skip
    recorder = Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0")
    beat = HeartbeatWriter(memoryview(bytearray(PAGE)))
    began = clock(device)
    parts = build(assignment, recipe, World(0, 1, device), recorder, StopRequest(), beat, None)
    saves, fed = NoSaves(device), dict[int, Any]()
    take = parts.feed.take

    def noted(step: int, *rest: Any) -> Any:
        lengths["now"] = work.warm_lengths if step == 1 else work.lengths
        if step == 2:
            tell_begin()
        fed["last"] = take(step, *rest)
        return fed["last"]

    parts.feed.take = noted  # type: ignore[method-assign]
    train(parts, saves)  # type: ignore[arg-type]
    recorder.event("end-span", name="startup")
    gib = peak_gib(device)
    times = [late - early for early, late in pairwise(saves.ends)]
    step_s = statistics.median(times)
    recorder.close()
    spans, mismatches = spans_of(run.events, since=2), mismatches_of(run.events)
    result: dict[str, Any] = {
        "step_s": step_s, "steps_s": times, "samples_s": work.answers / step_s, "first_s": saves.ends[0] - began,
        "gib": gib, **{f"{key}_in_step_s": value for key, value in spans.items()},
        "sync_ms": spans.get("sync", 0.0) * 1e3, "tokens": sum(work.lengths), "rows": len(fed["last"].rows.inputs),
        "sequences_at_once": at_once, "mismatches": mismatches,
    }  # fmt: skip
    print(json.dumps(result), flush=True)

    # the parts alone: the engine over the same requests, the training step over the same rows
    prompts = [parts.feed.prompts.prompt(number) for number in range(work.prompts)]
    requests = [
        answers.AnswerRequest(prompt, sample, answer)
        for sample, prompt in enumerate(prompts)
        for answer in range(work.samples)
    ]
    alone = list[float]()
    for number in range(options.parts):
        sampler = parts.feed.sampler(100 + number)
        start = clock(device)
        sampler.sample(requests, lambda _: None, lambda: None)
        alone.append(clock(device) - start)
    trained = [training_alone(parts, fed["last"], device) for _ in range(options.parts)]
    if options.profile is not None:
        kernels_of(lambda: training_alone(parts, fed["last"], device), f"{name}, train", options.profile)
    parts.feed.close()
    if not alone:
        return result
    generate, training = min(alone), min(trained)
    result |= {"generate_s": generate, "train_s": training, "parts_s": generate + training}
    return {**result, "overhead": step_s / (generate + training), "engine_tokens_s": sum(work.lengths) / generate}


def training_alone(parts: Any, fed: Any, device: torch.device) -> float:
    """Seconds of one update: forward, backward, clip, step."""
    from headway.parallel import finish_gradients, total_norm
    from headway.train.loop import global_counts
    from headway.train.optim import clip, set_step

    parameters = dict(parts.spread.model.named_parameters())
    start = clock(device)
    counts = global_counts(parts, 1, fed.trained, fed.counts)
    set_step(parts.optimizer.param_groups, 99, 1e-6)
    parts.spread.passes(fed.rows, counts.scale)
    finish_gradients(parameters, parts.spread.missing)
    norm = total_norm(parameters, parts.world, parts.spread.borrowed)
    clip(parts.optimizer, parameters.values(), norm, parts.recipe.train.clip)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    return clock(device) - start


def spans_of(events: Path, since: int) -> dict[str, float]:
    """Seconds of a step by span, means over the steps from `since` on, as a run records them."""
    sums, open_at, step, steps = dict[str, float](), dict[str, int](), 1, 0
    for line in (text for file in sorted(events.glob("*-rank-0.jsonl")) for text in file.open()):
        event = json.loads(line)
        kind, name = event.get("kind"), event.get("name")
        if kind == "begin":
            open_at[name] = event["t"]
        elif kind == "end-span" and name in open_at and step >= since:
            sums[name] = sums.get(name, 0.0) + (event["t"] - open_at.pop(name)) / 1e9
        elif kind == "step":
            step, steps = event["step"] + 1, steps + (event["step"] >= since)
    return {
        name: seconds / max(steps, 1) for name, seconds in sums.items() if name in ("generate", "score", "sync", "idle")
    }


def mismatches_of(events: Path) -> list[float]:
    """The mean difference of log-probabilities between trainer and sampler, by step."""
    lines = [json.loads(text) for file in sorted(events.glob("*-rank-0.jsonl")) for text in file.open()]
    return [event["mismatch"] for event in lines if event.get("kind") == "step"]


# -- TRL


def trl(work: Work, options: argparse.Namespace, folder: Path, *, vllm: bool) -> dict[str, Any]:
    """`GRPOTrainer`, with transformers' continuous batching or vLLM in this process."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    device = torch.device(options.device)
    write_tokenizer(folder / "model", work.model["vocab_size"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"), eos_token="<|end|>", pad_token="<|end|>"
    )
    config = peer_config(work, transformers)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    with torch.device(options.device):
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    draw(policy)
    if vllm:  # it opens a folder
        policy.save_pretrained(folder / "weights")
        tokenizer.save_pretrained(folder / "weights")
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=dtype).to(device)
    rows = min(options.batch_rows, work.answers)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "max_steps": 1 + options.peer_steps, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "seed": 0, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "gradient_checkpointing": False,
        "bf16": options.device == "cuda", "logging_steps": 1000, "beta": 0.0, "temperature": 1.0, "loss_type": "grpo",
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": work.answers // rows,
        "num_generations": work.samples, "max_completion_length": work.longest, "num_iterations": 1,
        "shuffle_dataset": False, "mask_truncated_completions": False,
    }  # fmt: skip
    if vllm:  # with TRL's own share of the memory, which holds all sequences; TRL makes texts of tokens itself
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": {"detokenize": False}}
    else:
        settings |= {"use_transformers_continuous_batching": True}
    if options.device == "cpu":
        settings |= {"use_cpu": True, "optim": "adamw_torch"}
    pattern = re.compile(REWARD)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(pattern.search(text) is not None) for text in completions]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Clocks what generates."""

        def _generate_single_turn(self, *args: Any, **more: Any) -> Any:
            start = clock(device)
            lengths["now"] = work.warm_lengths if self.state.global_step == 0 else work.lengths
            answered = super()._generate_single_turn(*args, **more)
            generated.append(clock(device) - start)
            given.append(statistics.mean(len(ids) for ids in answered[0]))
            return answered

    lengths, generated, given, ends = {"now": work.warm_lengths}, list[float](), list[float](), list[float]()
    force_vllm(lengths) if vllm else force_transformers(lengths)
    prompts = Dataset.from_dict({"prompt": [work.prompt(number) for number in range(work.prompts)]})
    trainer = Timed(
        model=policy, reward_funcs=reward, args=known(GRPOConfig, settings), train_dataset=prompts,
        processing_class=tokenizer, callbacks=[ends_of_steps(ends, device)],
    )  # fmt: skip
    gc.collect()
    began = clock(device)
    trainer.train()
    times = [late - early for early, late in pairwise(ends)]
    step_s, generate_s = statistics.median(times), statistics.median(generated[1:])
    return {
        "step_s": step_s, "steps_s": times, "samples_s": work.answers / step_s, "generate_s": generate_s,
        "train_s": step_s - generate_s, "first_s": ends[0] - began, "gib": peak_gib(device), "rows_a_pass": rows,
        "mean_lengths": given, "wanted_length": statistics.mean(work.lengths),
    }  # fmt: skip


def peer_config(work: Work, transformers: Any) -> Any:
    """The same shape for transformers."""
    from headway.recipe.load import parse_recipe

    model = parse_recipe({"model": dict(work.model), "data": {"path": "none"}}, {}, "benchmark").model
    values = model.to_config(work.prompt_tokens + work.longest)
    config = transformers.AutoConfig.for_model(**values)
    config.pad_token_id = config.eos_token_id = END
    config.bos_token_id = None
    return config


def force_transformers(lengths: dict[str, list[int]]) -> None:
    """Have continuous batching give each request its length; its own method gives all the same."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    def add_requests(self: Any, inputs: list[list[int]], **_: Any) -> list[str]:
        names = [f"forced-{number}" for number in range(len(inputs))]
        for name, ids, length in zip(names, inputs, lengths["now"], strict=True):
            self.add_request(ids, request_id=name, max_new_tokens=length, eos_token_id=-1)
        return names

    ContinuousBatchingManager.add_requests = add_requests


def force_vllm(lengths: dict[str, list[int]]) -> None:
    """Have vLLM give each answer its length: a group's are requests of their own."""
    from vllm import LLM

    generate = LLM.generate

    def forced(self: Any, prompts: list[Any], sampling_params: Any = None, **more: Any) -> Any:
        each, of = sampling_params.n, lengths["now"]
        params = [sampling_params.clone() for _ in range(len(prompts) * each)]
        for one, length in zip(params, of, strict=True):
            one.n, one.max_tokens, one.ignore_eos = 1, length, True
        outputs = generate(self, [prompt for prompt in prompts for _ in range(each)], params, **more)
        groups = [outputs[start : start + each] for start in range(0, len(outputs), each)]
        for group in groups:
            group[0].outputs = [output.outputs[0] for output in group]
        return [group[0] for group in groups]

    LLM.generate = forced


def ends_of_steps(ends: list[float], device: torch.device) -> Any:
    """A callback that notes when steps end."""
    from transformers import TrainerCallback

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(clock(device))
            if len(ends) == 1:
                tell_begin()

    return Ends()


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL reaches into the engine
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HOME", tempfile.gettempdir() + "/headway-benchmark-hub")
    main()
