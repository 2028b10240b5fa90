"""Whole runs on one GPU: speed, MFU and where the time goes, for a 0.1B and a 0.5B decoder.

    python benchmarks/train_gpu.py [--json FILE]

Every row is a real `headway train` of 60 steps in a temporary folder, read back through its own ledger; the data is the
standard library's source. Beside it stands the same model in a bare PyTorch loop (same precision, batch and
optimizer, no recording, no data) in the same process environment.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

from headway.models import empty_decoder, init_weights
from headway.plan import architecture_of, flops_per_token, parameters
from headway.recipe import Model
from headway.track import RunFolder, account, read_metric, read_run

SHAPES = {
    "0.1B": {"layers": 12, "dim": 768, "heads": 12, "vocab_size": 32000, "tie_embeddings": True},
    "0.5B": {"layers": 24, "dim": 1280, "heads": 10, "kv_heads": 5, "vocab_size": 32000, "tie_embeddings": True},
}
VARIANTS = [
    {"shape": "0.1B", "compile": False, "recompute": "none"},
    {"shape": "0.1B", "compile": True, "recompute": "none"},
    {"shape": "0.5B", "compile": False, "recompute": "full"},
    {"shape": "0.5B", "compile": True, "recompute": "none"},
]
SEQ, ROWS, STEPS = 2048, 16, 60
PEAK = 989.4e12


def headway(*words: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "headway.cli.main", *words], cwd=folder, check=True)


def trained(folder: Path, variant: dict) -> dict:
    """One run, and its ledger."""
    settings = {f"model.{key}": value for key, value in SHAPES[variant["shape"]].items()}
    settings |= {f"train.{key}": variant[key] for key in ("compile", "recompute")}
    settings |= {"train.dtype": "bfloat16", "train.batch": ROWS, "train.steps": STEPS, "data.seq": SEQ}
    settings |= {"checkpoint.every_steps": 0, "train.warmup_steps": 10}
    recipe = folder / "r.toml"
    recipe.write_text('name = "gpu"\n[data]\npath = "data"\n')
    name = f"r{time.time_ns()}"
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}")]
    headway("train", "r.toml", "--name", name, *words, folder=folder)
    run = RunFolder(folder / "runs" / name)
    ledger = account(read_run(run))
    steps = sorted(read_metric(run, "step_s")[1][20:].tolist())
    saves = [event["seconds"] for r in read_run(run) for event in r.events if event["kind"] == "checkpoint"]
    return {
        "step_s": steps[len(steps) // 2],
        "shares": {key: round(value / ledger.total_ns, 4) for key, value in ledger.accounts.items()},
        "seconds": {key: round(value / 1e9, 3) for key, value in ledger.accounts.items()},
        "save_s": saves[-1],
    }


def bare(variant: dict) -> float:
    """Median step of a loop with nothing in it but the model."""
    model = Model(**SHAPES[variant["shape"]])
    decoder = empty_decoder(model).cuda()
    init_weights(decoder, 0)
    if variant["recompute"] == "full":
        from torch.utils.checkpoint import checkpoint

        for block in decoder.layers:
            block.forward = lambda *args, inner=block.forward: checkpoint(inner, *args, use_reentrant=False)
    if variant["compile"]:
        for block in decoder.layers:
            block.forward = torch.compile(block.forward)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 2000, (ROWS, SEQ + 1), device="cuda")
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = decoder(tokens[:, :-1], tokens[:, 1:]) / (ROWS * SEQ)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[10:])[10]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = sysconfig.get_path("stdlib")
        headway("data", "build", "data", f"{library}/*.py", f"{library}/*/*.py", "--vocab-size", "2048", folder=folder)
        for variant in VARIANTS:
            result = trained(folder, variant)
            alone = bare(variant)
            torch.cuda.empty_cache()
            torch._dynamo.reset()
            model = Model(**SHAPES[variant["shape"]])
            mfu = flops_per_token(architecture_of(model), SEQ) * ROWS * SEQ / result["step_s"] / PEAK
            count = parameters(architecture_of(model))
            rows.append(variant | {"parameters": count, "bare_step_s": alone, "mfu": mfu} | result)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {ROWS} x {SEQ} tokens a step")
    print("shape   compile  recompute  step ms  bare ms  ratio    MFU  unattr.  save s")
    for row in rows:
        print(
            f"{row['shape']:6}{row['compile']!s:>9}{row['recompute']:>11}{row['step_s'] * 1e3:9.1f}"
            f"{row['bare_step_s'] * 1e3:9.1f}{row['step_s'] / row['bare_step_s']:7.3f}{row['mfu']:7.1%}"
            f"{row['shares']['unattributed']:9.2%}{row['save_s']:8.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
