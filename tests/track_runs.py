"""Records of runs with chosen steps, written as text."""

import json
from pathlib import Path

from headway.track import RunFolder, create_run, record_path


def line(kind: str, **fields: object) -> str:
    return json.dumps({"kind": kind, "t": 1, **fields}, separators=(",", ":")) + "\n"


def write_record(run: RunFolder, attempt: int, body: str, *, ended: bool = True, workers: int = 2) -> Path:
    opening = line("open", format=1, attempt=attempt, process="rank-0", wall=1e9, mono=1, boot="b", host="h", pid=1)
    path = record_path(run.events, attempt, "rank-0")
    path.write_text(opening + body)
    agent = line("attempt", workers=workers, device="cpu") + (line("end", outcome="finished") if ended else "")
    record_path(run.events, attempt, "agent").write_text(opening.replace("rank-0", "agent") + agent)
    return path


def step_line(step: int, loss: float | None, **more: object) -> str:
    return line("step", step=step, data=10**8, compute=9 * 10**8, loss=loss, tokens=100, **more)


def plain_run(root: Path, losses: list[float], name: str = "plain") -> RunFolder:
    run = create_run(root, "demo", name)
    facts = line("facts", flops_per_token=60.0, peak_flops=1500.0) + line("resumed", step=0)
    write_record(run, 1, facts + "".join(step_line(step, loss) for step, loss in enumerate(losses, 1)))
    return run
