"""Saves on one GPU: what a save costs the steps, how fast state leaves the device, how long until it is durable.

    python benchmarks/state_gpu.py [--json FILE] [--only memory|disk]

memory: an 8B decoder whose weights and AdamW moments are all bfloat16 (48 GB), two microbatches of 4,096 tokens a step,
one save to the agent's memory in 20 steps, through the code that training uses: the worker is a child of this process,
which is its agent. The link is measured beside it by a copy from the device to page-locked memory.

disk: a real `headway train` of a 1B decoder (float32 state, 15 GB) that saves to disk every 20 steps, read back through
its own record, then verified; beside it what the disk takes of the same bytes in the same folder.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from headway.agent.fd_store import FdStore
from headway.agent.saving.coordinator import SaveCoordinator as AgentSaves
from headway.recipe import FaultPlan, Recipe
from headway.state import Channel
from headway.track import Recorder, RunFolder, account, read_metric, read_run

EIGHT = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab_size": 128256}
EIGHT |= {"tie_embeddings": False}
ONE = {
    "layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocab_size": 128256, "tie_embeddings": True,
}  # fmt: skip
SEQ, MICROBATCHES, STEPS = 4096, 2, 20


# -- memory: the worker's side


def work(line: Channel, folder: Path, shape: dict) -> None:
    """Train in a bare loop, with and without a save in 20 steps; leaves its times in a file."""
    import torch

    from headway.models import empty_decoder
    from headway.parallel import World
    from headway.recipe import Model
    from headway.state.tensors import ModelShare
    from headway.track.heartbeat import HeartbeatWriter
    from headway.train.fault_injector import WorkerFaultInjector
    from headway.train.save import SaveClient

    torch.cuda.set_device(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        decoder = empty_decoder(Model(**shape))
    torch.set_default_dtype(torch.float32)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, shape["vocab_size"], (MICROBATCHES, 1, SEQ + 1), device="cuda")

    def step(saves: SaveClient | None) -> None:
        for part in tokens:
            (decoder(part[:, :-1], part[:, 1:]) / (MICROBATCHES * SEQ)).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        if saves is not None:
            saves.fence()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if saves is not None:
            saves.tick()

    def series(saves: SaveClient | None, save_at: int = 0, first: int = 0) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number in range(1, STEPS + 1):
            step(saves)
            torch.cuda.synchronize()  # the loop reads the loss of a step it saves
            if saves is not None and number == save_at:
                saves.save(first + number, 0, "", ("memory",))
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(3):
        step(None)
    torch.cuda.synchronize()
    started = time.perf_counter()
    world = World(rank=0, size=1, device=torch.device("cuda", 0))
    recorder = Recorder(folder / "worker.jsonl", attempt=1, process="rank-0")
    parts = SimpleNamespace(
        spread=SimpleNamespace(model=decoder), optimizer=optimizer, held=ModelShare(), world=world, recorder=recorder,
        faults=WorkerFaultInjector(FaultPlan(), 0, 1, decoder, folder),
        beat=HeartbeatWriter(memoryview(bytearray(4096))),
    )  # fmt: skip
    saves = SaveClient(line, parts, attempt=1)
    opened_s = time.perf_counter() - started
    state = sum(t.nbytes for own in saves._owned for t in [own.tensor])

    def alone(number: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        saves.save(number, 0, "", ("memory",))
        saves.finish()
        return time.perf_counter() - begun

    copies = [alone(number) for number in (1, 2, 3)]
    pinned = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    link = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        pinned.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        link.append(pinned.nbytes / (time.perf_counter() - begun))
    del pinned, source
    without, with_save = [], []
    for turn in range(3):
        without.append(series(None))
        with_save.append(series(saves, save_at=STEPS // 2, first=100 * (turn + 1)))
        saves.finish()
    result = {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "state_bytes": state,
        "opened_s": opened_s,
        "link_bytes_s": statistics.median(link),
        "copy_bytes_s": state / statistics.median(copies),
        "steps": STEPS,
        "without_s": without,
        "with_s": with_save,
        "stall": statistics.median(with_save) / statistics.median(without) - 1,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    (folder / "memory.json").write_text(json.dumps(result))


def memory(folder: Path, shape: dict) -> dict:
    """Be the agent of one worker."""
    run = RunFolder(folder)
    run.checkpoints.mkdir()
    recipe = Recipe.model_validate({"data": {"path": "-", "seq": 8, "version": "v"}})
    ours, theirs = Channel.pair()
    child = os.fork()  # before there are threads
    if child == 0:
        with contextlib.suppress(KeyboardInterrupt):
            (descriptor,) = theirs.receive(None)[0].descriptors
            work(Channel(socket.socket(fileno=descriptor)), folder, shape)
        os._exit(0)
    saves = AgentSaves(run, recipe, FaultPlan(), FdStore())
    recorder = Recorder(folder / "agent.jsonl", attempt=1, process="agent")
    saves.start(1, 1, recorder, recipe)
    line, end = Channel.pair()
    saves.listen(0, line)
    with contextlib.closing(end):
        ours.send("line", [end.fileno()])
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
        saves.hear()
    result = json.loads((folder / "memory.json").read_text())
    result["host_bytes"] = saves.memory.size
    result["buffers"] = saves.memory.buffers_each
    saves.close()
    recorder.close()
    return result


# -- disk


def headway(*words: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "headway.cli.main", *words], cwd=folder, check=True)


def disk(folder: Path, shape: dict, steps: int = 80) -> dict:
    """A real run, and what its record says of its saves."""
    library = sysconfig.get_path("stdlib")
    headway("data", "build", "data", f"{library}/*.py", "--vocab-size", "2048", folder=folder)
    (folder / "r.toml").write_text('name = "gpu"\n[data]\npath = "data"\n')
    settings = {f"model.{key}": str(value).lower() for key, value in shape.items()}
    settings |= {"train.dtype": "bfloat16", "train.batch": 8, "train.microbatch": 4, "train.steps": steps}
    settings |= {"data.seq": 2048, "checkpoint.every_steps": 20, "checkpoint.keep_last": 1, "train.warmup_steps": 5}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    headway("train", "r.toml", "--name", "r", *words, folder=folder)
    run = RunFolder(folder / "runs" / "r")
    records = read_run(run)
    ledger = account(records)
    agent = [event for record in records if record.header.process == "agent" for event in record.events]
    numbers, seconds = read_metric(run, "step_s")
    step = dict(zip(numbers.tolist(), seconds.tolist(), strict=True))
    saves = [event for event in agent if event["kind"] == "checkpoint"]
    kept = {event["step"]: event["seconds"] for event in agent if event["kind"] == "kept"}
    quiet = [s for n, s in step.items() if n > 10 and n < 20]
    writing = [step[n] for save in saves[:-1] for n in range(save["step"] + 1, save["step"] + 6) if n in step]
    headway("checkpoint", "verify", "r", folder=folder)
    return {
        "bytes": saves[-1]["bytes"],
        "durable_s": [event["seconds"] for event in saves],
        "host_stall_s": kept,
        "skipped": sum(event["kind"] == "skipped" for event in agent),
        "step_s": statistics.median(quiet),
        "step_while_writing_s": statistics.median(writing),
        "checkpoint_stall_share": ledger.accounts["checkpoint stall"] / ledger.total_ns,
        "memory": [event["bytes"] for event in agent if event["kind"] == "memory"],
        "raw_disk_bytes_s": raw_disk(folder, 4 << 30),
    }


def raw_disk(folder: Path, size: int) -> float:
    """What the disk takes with direct writes and an fsync."""
    import mmap

    block = mmap.mmap(-1, 8 << 20)
    block.write(os.urandom(8 << 20))
    path = folder / "raw"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    started = time.perf_counter()
    for _ in range(size // len(block)):
        os.write(descriptor, block)
    os.fsync(descriptor)
    taken = time.perf_counter() - started
    os.close(descriptor)
    path.unlink()
    return size / taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["memory", "disk"])
    options = parser.parse_args()
    found = {}
    for name, measure, shape in (("memory", memory, EIGHT), ("disk", disk, ONE)):
        if options.only in (None, name):
            folder = Path(tempfile.mkdtemp())
            try:
                found[name] = measure(folder, shape)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(json.dumps(found[name], indent=1), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=2))
    if "memory" in found:
        row = found["memory"]
        copied, link = row["copy_bytes_s"], row["link_bytes_s"]
        print(f"8B, {row['state_bytes'] / 1e9:.1f} GB: stall {row['stall']:.2%} of {STEPS} steps (goal 1 %)")
        print(f"  device to host {copied / 1e9:.1f} GB/s, {copied / link:.0%} of the link (goal 90 %)")
        print(f"  host memory {row['host_bytes'] / 1e9:.1f} GB in {row['buffers']} buffer(s)")
    if "disk" in found:
        row = found["disk"]
        durable, disk_alone = statistics.median(row["durable_s"]), row["raw_disk_bytes_s"]
        print(f"1B, {row['bytes'] / 1e9:.1f} GB: durable in {durable:.1f} s, {row['bytes'] / durable / 1e9:.2f} GB/s")
        print(f"  (the disk alone {disk_alone / 1e9:.2f} GB/s)")
        print(f"  steps while writing {row['step_while_writing_s'] / row['step_s']:.3f} x")
        print(f"  checkpoint stall {row['checkpoint_stall_share']:.2%} of the run")


if __name__ == "__main__":
    main()
