"""vLLM's side of inference_gpu.py: the same workloads on one GPU, with its V1 multiprocessing off and on.

    python benchmarks/vllm_gpu.py [--json OUT.json] [--only Llama-3.2-1B Qwen3-0.6B Llama-3-8B] [--modes off on]

Each model runs in a process of its own. Those of a mode load, compile and warm up at the same time; once all are ready,
they are timed one after the other while the rest wait. One that is not ready after --limit seconds is suspended while
others are timed. Models of the second mode find the compile caches that those of the first have filled.

Weights are random (load_format="dummy": uniform within 0.001) and prompts token ids; a model's folder holds config.json
alone. vLLM keeps its defaults except for the size of the KV cache, which is given so that models share the GPU, and for
the sampler: PyTorch's, not FlashInfer's. Prefix caching stays on; runs differ in their prompts' first tokens, so they
share nothing. Requests have no seeds of their own. Seconds until ready are those of processes that start together.

Needs vllm 0.24 and not Headway, so shapes and workloads are repeated here; a test holds them equal.
"""

import argparse
import contextlib
import json
import os
import platform
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

STARTED = psutil.Process().create_time()
PACKAGES = ("vllm", "torch", "triton", "transformers")
MODES = ("off", "on")
GIB = 2**30
WARM_UP = 9_999
"""First token of the prompts of warm-up; timed ones begin with the number of their run."""

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_8B = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    lengths: list[int]
    operations: float = 0.0
    """Where a row is TFLOP/s."""


@dataclass(frozen=True)
class Part:
    """A model and what it is timed with."""

    name: str
    shape: dict[str, Any]
    context: int
    cache_gib: float
    """0.6B holds its 256 sequences with 20 GiB, 8B its 128 with 20.3."""
    workloads: Callable[[], list[Workload]]


def random_prompts(count: int, shortest: int, longest: int) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return prompts, [draw.randint(shortest, longest) for _ in range(count)]


def single(name: str, length: int) -> Workload:
    return Workload(name, random_prompts(1, 128, 128)[0], [length])


def prefill(name: str, shape: dict[str, Any], sequences: int, length: int) -> Workload:
    """Operations are those of layers and causal attention, without the head's."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv_heads = (shape[key] * shape["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    matrices = 2 * hidden * heads + 2 * hidden * kv_heads + 3 * hidden * shape["intermediate_size"]
    weights = layers * (matrices + 2 * hidden) + hidden
    pairs = sequences * length**2 / 2 * heads * layers
    prompts = [[draw % 1000] * length for draw in range(sequences)]
    return Workload(name, prompts, [1] * sequences, 2 * sequences * length * weights + 4 * pairs)


PARTS = {
    part.name: part
    for part in (
        Part("Llama-3.2-1B", LLAMA, 4096, 2, lambda: [single("Llama 1B shape, batch 1", 512)]),
        Part("Qwen3-0.6B", QWEN3, 4096, 32, lambda: [
            single("Qwen3-0.6B shape, batch 1", 512),
            Workload("Qwen3-0.6B shape, 256 sequences", *random_prompts(256, 100, 1024)),
        ]),
        Part("Llama-3-8B", LLAMA_8B, 4112, 24, lambda: [
            single("Llama 8B shape, batch 1", 256),
            Workload("8B, 128 sequences, 1,000 in, 300 out", random_prompts(128, 1000, 1000)[0], [300] * 128),
            prefill("prefill of 8B, 8 x 4,096", LLAMA_8B, 8, 4096),
        ]),
    )
}  # fmt: skip


# -- in the process of a part

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and output lengths to output tokens."""


def config_json(shape: dict[str, Any]) -> str:
    fields = {key: value for key, value in shape.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    architectures = [ARCHITECTURES[shape["model_type"]]]
    return json.dumps(fields | {"rope_parameters": rope, "architectures": architectures, "dtype": "bfloat16"})


def engine_arguments(part: Part, folder: str) -> dict[str, Any]:
    return {
        "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "generation_config": "vllm", "max_model_len": part.context, "attention_config": {"backend": "FLASH_ATTN"},
        # Skips profiling of memory, whose share then only says what must be free at the start.
        "kv_cache_memory_bytes": int(part.cache_gib * GIB), "gpu_memory_utilization": 0.02,
    }  # fmt: skip


def import_vllm() -> None:
    from vllm import LLM, SamplingParams  # noqa: F401


def vllm_engine(part: Part, folder: str) -> tuple[Generate, dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(part, folder))

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False) for length in lengths
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, settings_of(llm)


def settings_of(llm: Any) -> dict[str, Any]:
    """What vLLM has chosen. A field that another release lacks is None."""
    config = llm.llm_engine.vllm_config
    groups = {
        "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "async_scheduling", "enable_chunked_prefill"),
        "cache_config": (
            "block_size", "enable_prefix_caching", "kv_cache_memory_bytes", "num_gpu_blocks", "kv_cache_size_tokens",
        ),
        "compilation_config": ("mode", "cudagraph_mode", "max_cudagraph_capture_size"),
        "model_config": ("max_model_len", "dtype"),
    }  # fmt: skip
    settings = {name: getattr(getattr(config, group), name, None) for group, names in groups.items() for name in names}
    settings["v2_model_runner"] = getattr(config, "use_v2_model_runner", None)
    return {
        name: value if isinstance(value, int | None) and not hasattr(value, "name") else str(value)
        for name, value in settings.items()
    }


def fake_engine(delay: str) -> tuple[Generate, dict[str, Any]]:
    """Ready after so many seconds, or never where `fail`."""
    if delay == "fail":
        raise RuntimeError("asked to fail")
    time.sleep(float(delay))
    draw = random.Random(0)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        time.sleep(0.01)
        return [[draw.randrange(1000) for _ in range(length)] for _, length in zip(prompts, lengths, strict=True)]

    return generate, {"fake": True}


def warm_up(generate: Generate, workloads: list[Workload]) -> None:
    """A shorter version of each workload. NaN logits would sample the same token again and again."""
    ids = list[int]()
    for workload in workloads:
        prompts = [[WARM_UP, *prompt[1:]] for prompt in workload.prompts[:64]]
        for output in generate(prompts, [min(length, 16) for length in workload.lengths[:64]]):
            ids += output
    if len(set(ids)) < len(ids) / 10:
        raise RuntimeError(f"{len(ids)} sampled tokens have {len(set(ids))} values: are logits NaN?")


def measure(generate: Generate, workload: Workload) -> dict[str, Any]:
    """Tokens per second, the best of three runs, as for ours."""
    runs = []
    for number in range(3):
        prompts = [[number, *prompt[1:]] for prompt in workload.prompts]  # nothing is shared with the run before
        started = time.perf_counter()
        outputs = generate(prompts, workload.lengths)
        runs.append(round(time.perf_counter() - started, 3))
        if [len(output) for output in outputs] != workload.lengths:
            raise RuntimeError(f"{workload.name}: outputs have other lengths than asked for")
    tokens, seconds = sum(workload.lengths), min(runs)
    value = {"tokens": tokens, "seconds": runs, "tokens_per_s": round(tokens / seconds, 1)}
    return value | ({"tflops": round(workload.operations / seconds / 1e12)} if workload.operations else {})


def run_part(part: Part, folder: str, delay: str | None) -> None:
    """Messages go to the pipe that was stdout, one JSON object per line; what vLLM prints there goes to the log."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    def await_order(order: str) -> None:
        if sys.stdin.readline().strip() != order:
            os._exit(1)  # the benchmark has ended

    try:
        if delay is None:
            import_vllm()
        import_s = round(time.time() - STARTED, 1)
        await_order("start")
        started = time.perf_counter()
        generate, settings = fake_engine(delay) if delay is not None else vllm_engine(part, folder)
        engine_s = round(time.perf_counter() - started, 1)
        workloads = part.workloads()
        warm_up(generate, workloads)
        ready_s = round(import_s + time.perf_counter() - started, 1)
        send(ready={"import_s": import_s, "engine_s": engine_s, "ready_s": ready_s}, settings=settings)
        await_order("time")
        for workload in workloads:
            send(row=workload.name, value=measure(generate, workload))
        send(done=True)
    except Exception as error:
        traceback.print_exc()
        send(error=f"{type(error).__name__}: {str(error).strip()[:500]}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the GPU's memory is freed at once; an engine process is ended with the group


# -- in the process that starts them


@dataclass
class PartProcess:
    part: Part
    mode: str
    process: subprocess.Popen[str]
    log: Path
    state: str = "starting"
    """Then ready, and done or failed."""

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: found out where its state is awaited
            print(order, file=self.process.stdin, flush=True)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # it leads a session

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


class Results:
    """What was measured so far; the file is written anew after each message."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "device": device(),
            "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
            "engine_arguments": {part.name: engine_arguments(part, "") for part in PARTS.values()},
            "rows": {}, "start_to_ready": {}, "settings": {}, "errors": {},
        }  # fmt: skip

    def add(self, kind: str, name: str, mode: str, value: Any) -> None:
        self.data[kind].setdefault(name, {})[mode] = value
        if kind != "settings":
            what = {"rows": "", "start_to_ready": ", start to ready", "errors": ", failed"}[kind]
            print(f"{time.time() - STARTED:6.1f} {name}{what}, multiprocessing {mode}", value, flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def table(self) -> str:
        modes = [mode for mode in MODES if any(mode in row for row in self.data["rows"].values())]
        columns = [f"{mode}, {unit}" for mode in modes for unit in ("tokens/s", "runs, s")]
        lines = ["| workload, V1 multiprocessing | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
        for name, row in self.data["rows"].items():
            cells = [cell for mode in modes for cell in cells_of(row.get(mode))]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        for name, starts in self.data["start_to_ready"].items():
            cells = [cell for mode in modes for cell in (f"{starts[mode]['ready_s']} s" if mode in starts else "-", "")]
            lines.append(f"| {name} shape, start to ready beside the others | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def cells_of(value: dict[str, Any] | None) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    rate = f"{value['tflops']} TFLOP/s" if "tflops" in value else f"{value['tokens_per_s']:,.0f}"
    return rate, ", ".join(f"{seconds:.3f}" for seconds in value["seconds"])


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def nvml(query: str) -> Any:
    """Of the first GPU, without a CUDA context; None where there is no GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return getattr(pynvml, query)(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:
        return None


def device() -> str | None:
    name = nvml("nvmlDeviceGetName")
    return None if name is None else str(name)


def used_memory() -> int:
    memory = nvml("nvmlDeviceGetMemoryInfo")
    return 0 if memory is None else int(memory.used)


def environment(mode: str, work: Path) -> dict[str, str]:
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(mode == "on")), "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(work / "vllm"),
        "TRITON_CACHE_DIR": str(work / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "PYTHONSAFEPATH": "1",  # or benchmarks/kernels would be found for the package of that name
    }  # fmt: skip


def launch(part: Part, mode: str, work: Path, fake: dict[str, str] | None) -> PartProcess:
    """Imports vLLM and waits for the order to start."""
    folder = work / part.name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config_json(part.shape))
    command = [sys.executable, __file__, "--part", part.name, str(folder)]
    if fake is not None:
        command.append(fake.get(part.name, "0"))
    log = work / f"{part.name}_{mode}.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, start_new_session=True,
            env=environment(mode, work),
        )  # fmt: skip
    return PartProcess(part, mode, process, log)


def none_is_starting(parts: list[PartProcess]) -> bool:
    return all(part.state != "starting" for part in parts)


class Turns:
    """Starts the parts of a mode together and times them one by one."""

    def __init__(self, parts: list[PartProcess], results: Results, timed_limit_s: float) -> None:
        self.parts = parts
        self.results = results
        self.timed_limit_s = timed_limit_s
        self.messages: queue.Queue[tuple[PartProcess, dict[str, Any]]] = queue.Queue()
        for part in parts:
            threading.Thread(target=self._read, args=(part,), daemon=True).start()

    def _read(self, part: PartProcess) -> None:
        assert part.process.stdout is not None
        for line in part.process.stdout:
            self.messages.put((part, json.loads(line)))

    def run_mode(self, mode: str, limits_s: tuple[float, float]) -> None:
        waiting = [part for part in self.parts if part.mode == mode and part.state == "starting"]
        for part in waiting:
            part.tell("start")
        for limit_s in limits_s:
            self.wait_until(partial(none_is_starting, waiting), limit_s)
            late = [part for part in waiting if part.state == "starting"]
            for part in late:
                part.signal(signal.SIGSTOP)
            for part in waiting:
                if part.state == "ready":
                    self.time_part(part)
            for part in late:
                part.signal(signal.SIGCONT)
            waiting = late
        for part in waiting:
            self.fail(part, f"not ready in time ({sum(limits_s):.0f} s)")

    def time_part(self, part: PartProcess) -> None:
        part.tell("time")
        if not self.wait_until(lambda: part.state != "ready", self.timed_limit_s):
            self.fail(part, f"timed workloads took more than {self.timed_limit_s:.0f} s")
        part.end()

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            try:
                self.apply(*self.messages.get(timeout=max(0.01, min(0.5, deadline - time.monotonic()))))
            except queue.Empty:
                for part in self.parts:
                    if part.state in ("starting", "ready") and part.process.poll() is not None:
                        self.fail(part, f"ended with status {part.process.returncode}")
        return condition()

    def apply(self, part: PartProcess, message: dict[str, Any]) -> None:
        add = partial(self.results.add, mode=part.mode)
        if "ready" in message:
            part.state = "ready"
            add("settings", part.part.name, value=message["settings"])
            add("start_to_ready", part.part.name, value=message["ready"])
        elif "row" in message:
            add("rows", message["row"], value=message["value"])
        elif "done" in message:
            part.state = "done"
        elif part.state != "failed":
            self.fail(part, message["error"])

    def fail(self, part: PartProcess, error: str) -> None:
        part.state = "failed"
        part.end()
        self.results.add("errors", part.part.name, part.mode, error)
        tail = part.log.read_text(errors="replace").splitlines()[-60:]
        lines = [f"-- end of the log of {part.part.name}, multiprocessing {part.mode}", *tail, "--"]
        print("\n".join(lines), file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="File for the results, written after each row.")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="Models.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="V1 multiprocessing.")
    parser.add_argument("--limit", type=float, default=150, help="Seconds until the models of a mode should be ready.")
    parser.add_argument("--grace", type=float, default=60, help="More seconds for late ones, after the others' turns.")
    parser.add_argument("--timed-limit", type=float, default=90, help="Seconds that timed workloads of one may take.")
    parser.add_argument("--logs", type=Path, help="Folder in which the logs of vLLM are kept.")
    parser.add_argument("--fake", nargs="*", metavar="MODEL=SECONDS|fail", help="Without vLLM or a GPU: turns alone.")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, folder, *delay = options.part
        run_part(PARTS[name], folder, delay[0] if delay else None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended
    fake = None if options.fake is None else dict(item.split("=") for item in options.fake)
    results, idle_bytes = Results(options.json), used_memory()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        parts = [launch(PARTS[name], mode, work, fake) for mode in options.modes for name in options.only]
        try:
            turns = Turns(parts, results, options.timed_limit)
            for mode in options.modes:
                turns.wait_until(lambda: used_memory() < idle_bytes + 2 * GIB, 20)
                turns.run_mode(mode, (options.limit, options.grace))
        finally:
            for part in parts:
                part.end()
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                for part in parts:
                    (options.logs / part.log.name).write_bytes(part.log.read_bytes())
    print(results.table())
    return 1 if results.data["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
