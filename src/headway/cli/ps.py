"""`headway ps`: lists the active runs of this machine and their processes."""

import time
from pathlib import Path
from textwrap import wrap

from headway.agent.live_runs import LiveRun, list_live_runs
from headway.cli.options import Json
from headway.cli.text import columns, duration, next_line, print_json
from headway.track import RunSummary, command, summarize


def ps(json: Json = False) -> None:
    """List active runs on this machine, wherever their folders are, with their processes."""
    active = [(live, summarize(live.run)) for live in list_live_runs()]
    if json:
        print_json([_document(*pair) for pair in active])
    elif not active:
        print("no active runs on this machine")
        print("next: headway train RECIPE")
    else:
        print("\n".join(_table(active)))
        roots = {live.run.path.parent for live, _ in active}
        root = roots.pop() if len(roots) == 1 else Path("DIR")
        print(next_line(command(root, "stacks RUN"), command(root, "stop RUN")))


def _table(active: list[tuple[LiveRun, RunSummary]]) -> list[str]:
    width = max(len("run"), *(len(live.run.name) for live, _ in active))
    head = f"{'run':{width}}  {'step':>11}  {'agent':>7}  {'launcher':>8}  {'workers':>7}  {'memory':>8}  {'up':>8}"
    lines = [head, *(line for live, summary in active for line in _rows(live, summary, width))]
    if max(len(line) for line in lines if not line.startswith(" ")) > columns(200):  # names on lines of their own
        lines = [part for line in lines for part in _split(line, width)]
    return lines


def _split(line: str, width: int) -> list[str]:
    """Return a row of the table as two lines, and others wrapped."""
    if line.startswith(" "):
        return wrap(line.strip(), columns(), initial_indent="  ", subsequent_indent="  ", break_long_words=False)
    return [line[:width].rstrip(), line[width + 2 :]]


def _rows(live: LiveRun, summary: RunSummary, width: int) -> list[str]:
    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    up = duration(time.time() - live.started)
    memory = f"{live.memory_bytes / 2**20:,.0f} MiB"
    launcher = live.keeper or ("gone" if live.led_here else "-")
    row = f"{live.run.name:{width}}  {f'{summary.step}{total}':>11}  {live.agent:>7}  {launcher:>8}"
    spares = f" and {live.spares} spare process" + "es" * (live.spares != 1) if live.spares else ""
    pids = ", ".join(map(str, live.workers)) or "none yet"
    return [
        f"{row}  {len(live.workers):>7}  {memory:>8}  {up:>8}",
        f"  workers {pids}{spares}; user {live.user}{'' if live.led_here else '; led elsewhere'}",
        f"  in {live.run.path.parent}",
    ]


def _document(live: LiveRun, summary: RunSummary) -> dict[str, object]:
    return {
        "run": live.run.name,
        "folder": str(live.run.path),
        "step": summary.step,
        "total_steps": summary.total_steps,
        **{key: value for key, value in vars(live).items() if key != "run"},
    }
