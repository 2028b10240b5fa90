"""`headway ps`: the runs that are alive on this machine, and their processes."""

import time
from typing import TYPE_CHECKING

from headway.cli.options import Json

if TYPE_CHECKING:
    from headway.agent.live_runs import LiveRun
    from headway.track import RunSummary

__all__ = ["ps"]


def ps(json: Json = False) -> None:
    """List the runs that are alive on this machine, wherever their folders are, with their agents."""
    from headway.agent.live_runs import list_live_runs
    from headway.cli.text import print_json
    from headway.track import summarize

    found = [(one, summarize(one.run)) for one in list_live_runs()]
    if json:
        print_json([_document(*pair) for pair in found])
    elif not found:
        print("no run is alive on this machine")
        print("next: headway train RECIPE")
    else:
        print("\n".join(_table(found)))
        print("next: headway stacks RUN, headway stop RUN")


def _table(found: "list[tuple[LiveRun, RunSummary]]") -> list[str]:
    width = max(len("run"), *(len(one.run.name) for one, _ in found))
    head = f"{'run':{width}}  {'step':>11}  {'agent':>7}  {'keeper':>7}  {'workers':>7}  {'memory':>8}  {'up':>8}"
    return [head, *(line for one, summary in found for line in _rows(one, summary, width))]


def _rows(one: "LiveRun", summary: "RunSummary", width: int) -> list[str]:
    from headway.cli.text import duration

    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    up = duration(time.time() - one.started)
    memory = f"{one.memory_bytes / 2**20:,.0f} MiB"
    keeper = one.keeper or ("gone" if one.led_here else "-")
    row = f"{one.run.name:{width}}  {f'{summary.step}{total}':>11}  {one.agent:>7}  {keeper:>7}"
    spares = f" and {one.spares} spare process" + "es" * (one.spares != 1) if one.spares else ""
    pids = ", ".join(map(str, one.workers)) or "none yet"
    return [
        f"{row}  {len(one.workers):>7}  {memory:>8}  {up:>8}",
        f"  workers {pids}{spares}; user {one.user}{'' if one.led_here else '; led elsewhere'}",
        f"  in {one.run.path.parent}",
    ]


def _document(one: "LiveRun", summary: "RunSummary") -> dict[str, object]:
    return {
        "run": one.run.name,
        "folder": str(one.run.path),
        "step": summary.step,
        "total_steps": summary.total_steps,
        "agent": one.agent,
        "keeper": one.keeper,
        "led_here": one.led_here,
        "workers": list(one.workers),
        "spares": one.spares,
        "memory_bytes": one.memory_bytes,
        "started": one.started,
        "user": one.user,
    }
