"""Run folders written by hand, line by line, for tests of the dashboard: no process ran, and every number is known."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKEN = "a-token-that-nobody-guesses"
WALL = 1_800_000_000.0
STEP_NS = 1_000_000_000
STARTUP_NS = 2_000_000_000

RECIPE = {
    "name": "tiny",
    "model": {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1},
    "data": {"path": "data/tiny", "seq": 32},
    "train": {"steps": 100, "batch": 4, "lr": 1e-3},
}


def lines(*events: dict[str, Any]) -> str:
    """Return events as JSON lines."""
    return "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)


def opening(process: str, attempt: int = 1, wall: float = WALL) -> dict[str, Any]:
    """Return the first line of a record; all processes have the same boot and thus one clock."""
    mono = round((wall - WALL) * 1e9)
    return {"kind": "open", "format": 1, "attempt": attempt, "process": process, "wall": wall, "mono": mono,
            "boot": "b", "host": "h", "pid": 7}  # fmt: skip


def step(number: int, loss: float | None, first: int = 1, **more: Any) -> dict[str, Any]:
    """Return the event of a step: half a tenth of it waits for data."""
    t = STARTUP_NS + (number - first + 1) * STEP_NS
    data = STEP_NS // 20
    return {"kind": "step", "t": t, "step": number, "data": data, "compute": STEP_NS - data, "loss": loss,
            "lr": 1e-3, "tokens": 128, **more}  # fmt: skip


def write_run(
    root: Path, name: str, losses: Sequence[float | None], *, recipe: dict[str, Any] | None = None,
    outcome: str | None = "finished", **more: Any,
) -> Path:  # fmt: skip
    """Write a run of one attempt and one worker; without an outcome it was killed."""
    folder = root / name
    for part in ("events", "checkpoints", "logs", "stacks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps(recipe or RECIPE))
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "packages": {"torch": "2"}}))
    (folder / "logs" / "0001-agent.log").write_text("the agent's log\n")
    end = STARTUP_NS + len(losses) * STEP_NS
    agent = [opening("agent"), {"kind": "attempt", "t": 0, "workers": 1, "device": "cpu", "from_step": 0}]
    if outcome is not None:
        agent.append({"kind": "end", "t": end, "outcome": outcome, "reason": "as told"})
    rank = [
        opening("rank-0"),
        {"kind": "begin", "t": 0, "name": "startup"},
        {"kind": "facts", "t": 1, "total_steps": len(losses), "flops_per_token": 1000, "peak_flops": 1e6},
        {"kind": "resumed", "t": 2, "step": 0},
        {"kind": "end-span", "t": STARTUP_NS, "name": "startup"},
        *(step(number, loss, **more) for number, loss in enumerate(losses, 1)),
    ]
    (folder / "events" / "0001-agent.jsonl").write_text(lines(*agent))
    (folder / "events" / "0001-rank-0.jsonl").write_text(lines(*rank))
    return folder


def falling(count: int, level: float = 5.0) -> list[float]:
    """Return losses that fall with a ripple."""
    return [level / math.sqrt(number) + 0.1 * math.sin(number) for number in range(1, count + 1)]


def write_broken_run(root: Path, name: str = "broken") -> Path:
    """Write a run of which nearly everything is damaged: half a line, noise, wrong kinds, no recipe."""
    folder = write_run(root, name, falling(5), outcome=None)
    (folder / "recipe.json").write_text('{"name": "tiny", ')
    (folder / "environment.json").write_text("[1, 2")
    (folder / "plan.json").write_bytes(b"\xff\xfe")
    record = folder / "events" / "0001-rank-0.jsonl"
    noise = (
        b'not json\n{"kind":"step","step":"seven","loss":[1]}\n{"kind":"step","t":"x","step":6}\n\x00\xff\n{"kind":"st'
    )
    record.write_bytes(record.read_bytes() + noise)
    (folder / "events" / "0002-rank-0.jsonl").write_text("")
    (folder / "events" / "zzzz-rank-0.jsonl").write_text("{}\n")
    (folder / "evals").mkdir()
    (folder / "evals" / "x.json").write_text("{")
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "batch-00000001.jsonl").write_text('{"format": 1, "step"')
    (folder / "checkpoints" / "step-00000005").mkdir()
    (folder / "checkpoints" / "step-00000005" / "manifest.json").write_text("{")
    return folder
