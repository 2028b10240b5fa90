"""A training step on one GPU: Headway beside transformers, with and without Liger-Kernel.

    python benchmarks/train_gpu.py [--rows NAME ...] [--ways WAY ...] [--rounds 1] [--json FILE] [--profile FILE]

Every way of a row runs in a process of its own, one after the other, in as many rounds; a process warms up, then times
20 steps of random tokens (`--steps`) on its own clock, the device idle before the first and after the last. Rows say
what is kept in which precision. Headway's step is the trainer's own (`headway.parallel.apply`, its optimizer, its
norm); the peers use torch.optim.AdamW (fused). All clip gradients to a norm of 1; `--peers-do-not-clip` leaves that out
for peers.

Rows in fp8 have the peer `torchao`: transformers' model whose blocks' linear layers torchao converts (the same layers
as ours), compiled block by block, with Liger's loss.

    python benchmarks/train_gpu.py --rows "8B 4096x2 fp8" "1B 4096x4 fp8" --ways headway torchao bound --json FILE

The mixture of experts has the shape of OLMoE (6.9B, 64 experts of which a token takes 8) and the peer `transformers`,
with its grouped products.

    python benchmarks/train_gpu.py --rows "OLMoE 4096x4" --ways headway transformers bound

Its rows in fp8 have the experts in float8, or all linear layers of blocks.

The row of one long sequence has a peer with gradient checkpointing, whose attention is cuDNN's in both passes; it takes
ten seconds per step, and times the second.

The bound of a row is the sum of what no step can do without, at the rates measured in the same run: its products at
their own shapes by cuBLAS, causal attention by cuDNN, and the bytes of everything else at the speed of a copy.
"""

import argparse
import fcntl
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK = 990e12
STEPS, WARM = 20, 4
LLAMA_1B = {"layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "tie_embeddings": True}
LLAMA_3B = {"layers": 28, "dim": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128, "hidden": 8192,
            "tie_embeddings": True}  # fmt: skip
LLAMA_8B = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "tie_embeddings": False}
SMOLLM2_135M = {"layers": 30, "dim": 576, "heads": 9, "kv_heads": 3, "hidden": 1536, "tie_embeddings": True,
                "vocab_size": 49152}  # fmt: skip
LLAMA_350M = {"layers": 24, "dim": 1024, "heads": 16, "kv_heads": 16, "hidden": 2816, "tie_embeddings": True,
              "vocab_size": 50304}  # fmt: skip
QWEN_4B = {"layers": 36, "dim": 2560, "heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 9728, "qk_norm": True,
           "tie_embeddings": True, "vocab_size": 151936}  # fmt: skip
OLMOE = {"family": "qwen3_moe", "layers": 16, "dim": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128,
         "hidden": 8192, "expert_hidden": 1024, "experts": 64, "top_k": 8, "normalize_weights": False, "balance": 0.01,
         "tie_embeddings": False, "vocab_size": 50304}  # fmt: skip
LOW = {"dtype": "bfloat16", "weights": "bfloat16", "moments": "bfloat16"}
ROWS: dict[str, dict[str, Any]] = {
    "1B 4096x4": {"model": LLAMA_1B, "seq": 4096, "batch": 4, "train": LOW},
    "1B 4096x16": {"model": LLAMA_1B, "seq": 4096, "batch": 16, "train": LOW},
    "8B 4096x2": {"model": LLAMA_8B, "seq": 4096, "batch": 2, "train": LOW},
    "8B 8192x1": {"model": LLAMA_8B, "seq": 8192, "batch": 1, "train": LOW},
    "8B 16384x1": {"model": LLAMA_8B, "seq": 16384, "batch": 1, "train": LOW | {"recompute": "selective"}},
    "135M 2048x2": {"model": SMOLLM2_135M, "seq": 2048, "batch": 2, "train": LOW},
    "135M 2048x8": {"model": SMOLLM2_135M, "seq": 2048, "batch": 8, "train": LOW},
    "135M 2048x32": {"model": SMOLLM2_135M, "seq": 2048, "batch": 32, "train": LOW},
    "350M 2048x4": {"model": LLAMA_350M, "seq": 2048, "batch": 4, "train": LOW},
    "350M 2048x16": {"model": LLAMA_350M, "seq": 2048, "batch": 16, "train": LOW},
    "3B 4096x2": {"model": LLAMA_3B, "seq": 4096, "batch": 2, "train": LOW},
    "4B 4096x4": {"model": QWEN_4B, "seq": 4096, "batch": 4, "train": LOW},
    "1B 4096x4 float32": {"model": LLAMA_1B, "seq": 4096, "batch": 4, "train": {"dtype": "bfloat16"}},
    "3B 4096x2 float32": {"model": LLAMA_3B, "seq": 4096, "batch": 2, "train": {"dtype": "bfloat16"}},
    "1B 4096x4 masters": {
        "model": LLAMA_1B, "seq": 4096, "batch": 4,
        "train": {"dtype": "bfloat16", "weights": "bfloat16", "master": True},
    },
    "3B 4096x2 masters": {
        "model": LLAMA_3B, "seq": 4096, "batch": 2,
        "train": {"dtype": "bfloat16", "weights": "bfloat16", "master": True},
    },
    "1B 131072x1": {"model": LLAMA_1B, "seq": 131072, "batch": 1, "steps": 1, "checkpoint": True,
                    "train": LOW | {"recompute": "except-attention"}},
    "8B 4096x2 fp8": {"model": LLAMA_8B, "seq": 4096, "batch": 2, "train": LOW | {"fp8": {}}},
    "1B 4096x4 fp8": {"model": LLAMA_1B, "seq": 4096, "batch": 4, "train": LOW | {"fp8": {}}},
    "OLMoE 4096x4": {"model": OLMOE, "seq": 4096, "batch": 4, "train": LOW, "peer": "transformers"},
    "OLMoE 4096x4 fp8 experts": {
        "model": OLMOE, "seq": 4096, "batch": 4, "train": LOW | {"fp8": {"layers": ["**.experts"]}},
        "peer": "transformers",
    },
    "OLMoE 4096x4 fp8": {
        "model": OLMOE, "seq": 4096, "batch": 4, "train": LOW | {"fp8": {}}, "peer": "transformers",
    },
}  # fmt: skip
WAYS = ("headway", "liger", "transformers", "torchao", "torchao-rowwise", "bound")
Step = Callable[[], torch.Tensor]


def main() -> None:
    """Run all, print a table; or, as a child, one way of one row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=["1B 4096x4", "8B 4096x2"])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=["headway", "liger", "bound"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS, help="Timed steps, in four parts.")
    parser.add_argument("--lock", type=Path, help="Time steps only while holding this file: others may compile then.")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="Settings of Headway's recipe.")
    parser.add_argument("--data", type=Path, help="A data set whose tokens are read, in place of random ones.")
    parser.add_argument("--peers-do-not-clip", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="Append a table of kernels of one step of each way.")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one, options)))
        return
    found = list[dict[str, Any]]()
    for _ in range(options.rounds):
        for row in options.rows:
            for way in options.ways:
                found.append(in_a_process(row, way, options))
                print(line(found[-1], found), flush=True)
                if options.json:
                    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "clocks": clocks()}
                    options.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


def in_a_process(row: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One way of one row, by a process of its own."""
    words = [sys.executable, __file__, "--one", row, way, "--steps", str(options.steps), "--set", *options.set]
    words += ["--profile", str(options.profile)] if options.profile else []
    words += ["--data", str(options.data)] if options.data else []
    words += ["--lock", str(options.lock)] if options.lock else []
    words += ["--peers-do-not-clip"] if options.peers_do_not_clip else []
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"row": row, "way": way, "error": f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(one: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """For people, with the ratio to the peer's of the same row."""
    if "error" in one:
        return f"{one['row']:20}{one['way']:14}{one['error']}"
    text = f"{one['row']:20}{one['way']:14}{one['step_s'] * 1e3:8.1f} ms{one['tokens_s']:9,.0f} tokens/s"
    text += f"{one['mfu']:7.1%} MFU{one.get('gib', 0):7.1f} GiB"
    peer = ROWS[one["row"]].get("peer") or ("torchao" if "fp8" in one["row"] else "liger")
    ligers = [other["step_s"] for other in found if (other["row"], other["way"]) == (one["row"], peer)]
    if one["way"] == peer:
        ours = [other["step_s"] for other in found if (other["row"], other["way"]) == (one["row"], "headway")]
        return text + (f"   headway x{one['step_s'] / statistics.median(ours):.3f}" if ours else "")
    if one["way"] == "headway":
        text += f"   first step {one['first_s']:.1f} s"
        if one["busy"] is not None:
            text += f", busy {one['busy']:.1%}, the host " + (
                "never waits" if not one["host_waits"] else f"waits: {one['host_waits']}"
            )
    return text + (f"   x{statistics.median(ligers) / one['step_s']:.3f} of {peer}" if ligers else "")


def clocks() -> str:
    """Clocks, power and temperature, as the driver tells them."""
    asked = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    done = subprocess.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.stdout.strip()


def measured(row: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One way of one row, in this process."""
    from headway.plan import flops_per_token
    from headway.recipe import Model

    shape = ROWS[row]
    model = Model(**{"vocab_size": 128256} | shape["model"])
    tokens = shape["batch"] * shape["seq"]
    flops = flops_per_token(model.architecture(), shape["seq"]) * tokens
    about = {"row": row, "way": way}
    if way == "bound":
        total, parts = bound(model, shape)
        rates = {"step_s": total, "tokens_s": tokens / total, "mfu": flops / total / PEAK}
        return {**about, **rates, "parts_ms": parts}
    began, steps = time.perf_counter(), shape.get("steps", options.steps)
    step = headway(model, shape, options) if way == "headway" else peer(model, shape, way, options)
    loss = step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    if options.lock:
        held = options.lock.open("w")  # until this process ends
        fcntl.flock(held, fcntl.LOCK_EX)
    parts = min(4, steps)
    for _ in range(0 if "steps" in shape else WARM):
        step()
    torch.cuda.synchronize()
    times, begin = list[float](), time.perf_counter()
    for _ in range(parts):
        for _ in range(steps // parts):
            loss = step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / (steps // parts))
        begin = time.perf_counter()
    step_s = statistics.median(times)
    traced = "steps" not in shape or options.profile
    waits = host_waits(step) if traced else None
    busy = kernels_of(step, f"{row}, {way}", options.profile) if traced else None
    memory = torch.cuda.max_memory_allocated() / 2**30
    rates = {"step_s": step_s, "tokens_s": tokens / step_s, "mfu": flops / step_s / PEAK, "gib": memory}
    found = {"loss": loss.item(), "first_s": first_s, "busy": busy, "times_s": times, "power": clocks()}
    return {**about, **rates, **found, "host_waits": waits, "settings": options.set}


def host_waits(step: Step) -> str:
    """Where the host waits for the device in a step; empty where it does not."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def headway(model: Any, shape: dict[str, Any], options: argparse.Namespace) -> Step:
    """The trainer's own step, but for the data."""
    from headway.models import empty_decoder
    from headway.parallel import World, parallelize_model, total_norm
    from headway.parallel.objective import DeviceBatch, SumScale
    from headway.recipe.load import parse_recipe, with_settings
    from headway.train.cuda_graphs import passes_of
    from headway.train.optim import build_optimizer, clip, lower, set_step, widen_gradients
    from headway.train.optimizer_in_backward import early_updates

    train = {"batch": shape["batch"], "lr": 1e-4, **shape["train"]}
    values = {
        "model": {"family": model.family, **model.model_dump(exclude_defaults=True)},
        "data": {"path": "none", "seq": shape["seq"]},
    }
    recipe = with_settings(parse_recipe({**values, "train": train}, {}, "benchmark"), options.set)
    world = World(0, 1, torch.device("cuda", 0))
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    plain = empty_decoder(recipe.model, "meta")
    lower(plain, recipe.train)
    spread = parallelize_model(plain, recipe, world)
    if spread.accumulates:
        widen_gradients(spread.model)
    draw(spread.model)
    optimizer = build_optimizer(spread.model, recipe.train, 0, world)
    parameters = dict(spread.model.named_parameters())
    tokens = some_tokens(model, shape, options.data)
    batch = DeviceBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    scale = SumScale.per_label(shape["batch"] * shape["seq"])
    done, passes, early = 0, passes_of(spread, recipe, world), early_updates(spread, optimizer, recipe, world)

    def step() -> torch.Tensor:
        nonlocal done
        done += 1
        set_step(optimizer.param_groups, done, 1e-4)
        loss = passes(batch, scale)
        norm = total_norm(parameters, world) if early is None else early.norm(parameters)
        if recipe.train.clip > 0:
            clip(optimizer, parameters.values(), norm, recipe.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if spread.float8 is not None:
            spread.float8.forget()
        return loss

    return step


def peer(model: Any, shape: dict[str, Any], way: str, options: argparse.Namespace) -> Step:
    """transformers' model and torch's optimizer; with Liger, its kernels put in."""
    import transformers

    norms, mixture = getattr(model, "qk_norm", False), hasattr(model, "experts")
    kind = "Qwen3Moe" if mixture else "Qwen3" if norms else "Llama"
    if way == "liger":
        from liger_kernel import transformers as liger

        (liger.apply_liger_kernel_to_qwen3 if norms else liger.apply_liger_kernel_to_llama)()
    if way.startswith("torchao"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=False, swiglu=False, rms_norm=False, cross_entropy=False, fused_linear_cross_entropy=True
        )
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocabulary, hidden_size=model.dim, intermediate_size=model.hidden,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, tie_word_embeddings=model.tie_embeddings,
        max_position_embeddings=max(32768, shape["seq"]), attn_implementation="sdpa", use_cache=False,
        **(experts_of(model) if mixture else {}),
    )  # fmt: skip
    low = shape["train"].get("weights") == "bfloat16"
    torch.set_default_dtype(torch.bfloat16 if low else torch.float32)
    with torch.device("meta"):
        made = getattr(transformers, f"{kind}ForCausalLM")(config)
    made = made.to_empty(device="cuda")
    torch.set_default_dtype(torch.float32)
    # its table is no parameter, and to_empty emptied it
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to("cuda")
    made.tie_weights()
    draw(made)
    made.train()
    if shape.get("checkpoint"):
        made.gradient_checkpointing_enable({"use_reentrant": False})
    if way.startswith("torchao"):
        in_float8(made, "rowwise" if way.endswith("rowwise") else "tensorwise")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = some_tokens(model, shape, options.data)[:, :-1].contiguous()

    cudnn = partial(sdpa_kernel, [SDPBackend.CUDNN_ATTENTION]) if shape.get("checkpoint") else nullcontext

    def step() -> torch.Tensor:
        with cudnn():  # in the backward pass too, for what it recomputes
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not low):
                loss: torch.Tensor = made(input_ids=tokens, labels=tokens).loss
            loss.backward()
        if not options.peers_do_not_clip:
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def experts_of(model: Any) -> dict[str, Any]:
    """What transformers calls a mixture's sizes, and its grouped products."""
    return {
        "num_experts": model.experts, "num_experts_per_tok": model.top_k, "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.normalize_weights, "output_router_logits": True,
        "router_aux_loss_coef": model.balance, "experts_implementation": "grouped_mm",
    }  # fmt: skip


def in_float8(model: Any, scaling: str) -> None:
    """Convert the linear layers of blocks by torchao, and compile the blocks."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(scaling)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    for layer in model.model.layers:
        layer.compile()


def draw(model: torch.nn.Module) -> None:
    """Weights as a fresh model has them, on the device."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)


def some_tokens(model: Any, shape: dict[str, Any], data: Path | None) -> torch.Tensor:
    """A batch: random, or the first windows of a data set."""
    rows, length = shape["batch"], shape["seq"] + 1
    if data is not None:
        from headway.data import open_dataset

        tokens = open_dataset(data).tokens[0][: rows * length].astype("int64")
        return torch.from_numpy(tokens.reshape(rows, length)).cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randint(model.vocabulary, (rows, length), device="cuda", generator=generator)


def kernels_of(step: Step, name: str, profile: Path | None) -> float:
    """The share of a step in which some kernel runs; where a file is named, with a table of them."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type.name == "CUDA")
    busy, end = 0.0, spans[0][0]
    for begin, stop in spans:
        busy, end = busy + max(0.0, stop - max(begin, end)), max(end, stop)
    share = busy / (end - spans[0][0])
    if profile is not None:
        rows = sorted(found.key_averages(), key=lambda e: -e.device_time_total)[:40]
        text = [f"{e.device_time_total / 2e3:9.3f} ms {e.count // 2:5}  {e.key[:120]}" for e in rows]
        with profile.open("a") as file:
            file.write(f"== {name}: busy {busy / 2e3:.1f} ms a step, {share:.2%}\n" + "\n".join(text) + "\n")
    return share


# -- the least that a step could take


def bound(model: Any, shape: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Seconds, and milliseconds of each part."""
    tokens, width, layers = shape["batch"] * shape["seq"], model.dim, model.layers
    inner, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    mixture = hasattr(model, "experts")
    products = [(width, inner), (width, kv), (width, kv), (inner, width)]
    feed_forward = [(width, model.hidden), (width, model.hidden), (model.hidden, width)]
    products += [(width, model.experts)] if mixture else feed_forward
    low = "fp8" in shape["train"] and not mixture
    parts = {"products": layers * sum(three_products(tokens, *one, low=low) for one in products)}
    if mixture:
        parts["experts"] = layers * 3 * grouped_products(tokens * model.top_k, model)
    parts["head"] = three_products(tokens, width, model.vocabulary)
    parts["attention"] = layers * attention(model, shape)
    gc.collect()
    torch.cuda.empty_cache()
    speed = copy_speed()
    # Of each layer's stream, once each way: two norms with their additions read and write two of it in the forward pass
    # and three and one in the backward pass; turns read and write queries and keys, both ways; the gate as it is.
    stream = tokens * width * 2
    moved = 2 * (4 + 4) * stream + 4 * tokens * (inner + kv) * 2
    if mixture:  # rows are spread and combined in both passes; the activation is made again in the backward pass
        rows = tokens * model.top_k
        moved += 4 * stream + (1 + 1 + 1 + 2) * rows * width * 2 + (3 + 6) * rows * model.expert_hidden * 2
    else:
        moved += (3 + 5) * tokens * model.hidden * 2
    parts["between"] = layers * moved / speed
    if low:  # each factor is read once and written both ways: inputs, gradients and weights
        factors = sum(tokens * (one + other) + one * other for one, other in products)
        parts["casts"] = layers * factors * 4 / speed
    parts["loss rows"] = 2 * tokens * model.vocabulary * 2 / speed
    kept = shape["train"]
    weights = 2 if kept.get("weights") == "bfloat16" else 4
    moments = 2 if kept.get("moments") == "bfloat16" else 4
    masters = 8 if kept.get("master") else 0
    count = parameters_of(model)
    each = (2 * weights if not masters else weights + masters) + 4 * moments + 2 * min(weights, 4)  # with the norm
    parts["update"] = count * each / speed
    return sum(parts.values()), {name: round(seconds * 1e3, 3) for name, seconds in parts.items()}


def parameters_of(model: Any) -> int:
    """Of the whole model."""
    from headway.plan import parameters

    return int(parameters(model.architecture()))


def clocked(call: Callable[[], object], times: int = 10) -> float:
    """The median of some calls, in seconds."""
    for _ in range(min(3, times - 1)):
        call()
    found = list[float]()
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def three_products(tokens: int, inputs: int, outputs: int, low: bool = False) -> float:
    """A linear map's forward pass and both gradients; of a head, a part of the tokens at a time."""
    if low:
        return sum(
            scaled_product(m, n, k, fast)
            for m, n, k, fast in (
                (tokens, outputs, inputs, True), (tokens, inputs, outputs, False), (outputs, inputs, tokens, False)
            )
        )  # fmt: skip
    rows = min(tokens, max(1024, 2**31 // (2 * outputs)))
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
    calls = (lambda: x @ w.T, lambda: y @ w, lambda: y.T @ x)
    return sum(clocked(call) for call in calls) * tokens / rows


def grouped_products(rows: int, model: Any) -> float:
    """A matrix of each expert, forward pass and both gradients, of rows that are spread evenly."""
    width, hidden, experts = model.dim, model.expert_hidden, model.experts
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, hidden, width, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    calls = (
        lambda: torch._grouped_mm(x, w.mT, offs=ends), lambda: torch._grouped_mm(y, w, offs=ends),
        lambda: torch._grouped_mm(y.mT, x, offs=ends),
    )  # fmt: skip
    return sum(clocked(call) for call in calls)


def scaled_product(m: int, n: int, k: int, fast: bool) -> float:
    """A product in float8, of a gradient in e5m2 where sums are not fast."""
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn if fast else torch.float8_e5m2)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    return clocked(
        lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    )


def attention(model: Any, shape: dict[str, Any]) -> float:
    """Causal, both passes, by cuDNN."""

    def heads(count: int) -> torch.Tensor:
        made = torch.randn(shape["batch"], shape["seq"], count, model.head_dim, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = heads(model.heads), heads(model.kv_heads), heads(model.kv_heads)
    slope = torch.randn_like(q)

    def both() -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(y, (q, k, v), slope)

    return clocked(both, shape.get("steps", 10))


def copy_speed() -> float:
    """Bytes read and written in a second."""
    a = torch.empty(2**30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / clocked(lambda: b.copy_(a))


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
