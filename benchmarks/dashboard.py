"""How long 100 runs of 100,000 steps take to be drawn: `python benchmarks/dashboard.py [--runs N] [--steps N]`.

Writes synthetic runs, starts `headway ui` on them, opens the page that lays them over each other in Chromium, and
measures from the start of the navigation to the last line drawn. The first time, the server compacts what it reads;
then comes a restarted server, as everybody meets it later. Also measured: the CPU time of the server while a page
follows a run.

Needs Debian's chromium and `npm ci` in src/headway/dashboard/app. Writes benchmarks/results/dashboard_cpu.json.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
DRIVER = ROOT / "tests/dashboard/browser.mjs"
RESULT = ROOT / "benchmarks/results/dashboard_cpu.json"
GOAL_S = 1.5


def write_runs(root: Path, runs: int, steps: int) -> None:
    """Write runs of one attempt with a noisy falling loss and a spike of one step each."""
    noise = [random.Random(0).gauss(0, 0.05) for _ in range(4096)]
    for number in range(runs):
        folder = root / f"sweep-{number:03d}"
        (folder / "events").mkdir(parents=True)
        recipe = {"name": "sweep", "seed": number, "train": {"lr": round(1e-4 * 1.05**number, 8), "steps": steps}}
        (folder / "recipe.json").write_text(json.dumps({"data": {"path": "none"}, **recipe}))
        opening = {
            "kind": "open",
            "format": 1,
            "attempt": 1,
            "wall": 1.8e9,
            "mono": 0,
            "boot": "b",
            "host": "h",
            "pid": 1,
        }
        level, spike = 2 + 0.01 * number, 1 + (number * 7919) % steps
        with (folder / "events/0001-rank-0.jsonl").open("w") as file:
            file.write(_line({**opening, "process": "rank-0"}) + _line({"kind": "resumed", "t": 0, "step": 0}))
            for step in range(1, steps + 1):
                loss = level + 6 / math.sqrt(step) + noise[(step * 31 + number) % 4096] + 4 * (step == spike)
                file.write(
                    f'{{"kind":"step","t":{step * 1000000},"step":{step},"data":1000,"compute":999000,'
                    f'"loss":{loss:.6f},"grad_norm":1.0,"lr":0.001,"tokens":4096}}\n'
                )
        with (folder / "events/0001-agent.jsonl").open("w") as file:
            file.write(_line({**opening, "process": "agent"}))
            file.write(_line({"kind": "attempt", "t": 0, "workers": 1, "device": "cpu", "from_step": 0}))
            file.write(_line({"kind": "end", "t": steps * 1000000, "outcome": "finished", "reason": ""}))


def _line(event: dict[str, object]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


@contextlib.contextmanager
def server(root: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run `headway ui`; yield its process and address."""
    command = [sys.executable, "-m", "headway", "ui", "--port", "0", "--json", "--runs", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += process.stdout.readline()
        try:
            yield psutil.Process(process.pid), json.loads(text)["address"]
        finally:
            process.terminate()


def drawn(address: str, names: list[str]) -> dict[str, float]:
    """Return the seconds until the page has drawn, and what the browser took of them."""
    path = "/compare?key=loss&" + "&".join(f"run={name}" for name in names)
    request = json.dumps({"do": "draw", "address": address, "path": path})
    output = subprocess.run(["node", str(DRIVER), request], check=True, capture_output=True, text=True).stdout
    return json.loads(output)


def cpu_while_following(process: psutil.Process, address: str, run: str, folder: Path) -> float:
    """Return the share of one core that the server takes while a page follows a run that does a step per second."""
    request = json.dumps({"do": "follow", "address": address, "path": f"/run/{run}", "seconds": 20})
    with subprocess.Popen(["node", str(DRIVER), request], stdout=subprocess.PIPE, text=True) as browser:
        assert browser.stdout is not None
        browser.stdout.readline()  # the page is there
        times, began = process.cpu_times(), time.monotonic()
        step = 10_000_000
        while browser.poll() is None:
            time.sleep(1)
            step += 1
            with (folder / "events/0001-rank-0.jsonl").open("a") as file:
                file.write(
                    _line({"kind": "step", "t": step * 1000, "step": step, "data": 1, "compute": 9, "loss": 2.0})
                )
        after, seconds = process.cpu_times(), time.monotonic() - began
    return (after.user + after.system - times.user - times.system) / seconds


def cpu_of_answers(root: Path, run: str, seconds: int = 120) -> dict[str, float]:
    """Return what a page's questions take of a core while it follows a run that does a step per second.

    Without a browser and without waiting: in this process, by a clock that goes a second per step.
    """
    from headway.dashboard.cached import Cache
    from headway.dashboard.recorded import RecordedRuns
    from headway.dashboard.run_page import ledger_document, overview

    now = 0.0

    def clock() -> float:
        return now + time.process_time()

    recorded = RecordedRuns(root)
    recorded.cache = Cache(clock=clock)
    folder, shares = recorded.find(run), dict.fromkeys(("overview", "ledger", "plots"), 0.0)
    questions = {
        "overview": lambda: overview(recorded, folder, run),
        "ledger": lambda: ledger_document(recorded, folder),
        "plots": lambda: [recorded.series([run], key, 600) for key in ("loss", "grad_norm", "lr", "tokens_per_s")],
    }
    recorded.prepare([run])
    for second in range(seconds):
        with (folder.events / "0001-rank-0.jsonl").open("a") as file:
            step = 20_000_000 + second
            file.write(_line({"kind": "step", "t": step * 1000, "step": step, "data": 1, "compute": 9, "loss": 2.0}))
        now += 1.0
        for name, ask in questions.items():
            began = time.process_time()
            ask()
            shares[name] += (time.process_time() - began) / seconds
    return {name: round(share, 4) for name, share in shares.items()}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-follow", action="store_true", help="Do not measure the cost of live updates.")
    parser.add_argument("--answers-only", action="store_true", help="Print what following costs; no browser.")
    parser.add_argument("--keep", type=Path, help="Folder of the synthetic runs, to be used again.")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="dashboard-bench-"))
    try:
        if not any(root.glob("sweep-*")):
            write_runs(root, options.runs, options.steps)
        names = sorted(path.name for path in root.glob("sweep-*"))
        if options.answers_only:
            print(json.dumps({"cores_while_following": cpu_of_answers(root, names[0])}))
            return
        with server(root) as (_, address):
            first = drawn(address, names)
        with server(root) as (process, address):
            cold = drawn(address, names)
            warm = [drawn(address, names) for _ in range(options.repeats)]
            following = None if options.no_follow else cpu_while_following(process, address, names[0], root / names[0])
        times = sorted(run["seconds"] for run in warm)
        result = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
            "runs": len(names),
            "steps": options.steps,
            "goal_s": GOAL_S,
            "first_time": first,
            "after_restart": cold,
            "warm_s": times,
            "warm_median_s": times[len(times) // 2],
            "warm_last": warm[-1],
            "server_cores_while_following": following,
        }
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    finally:
        if options.keep is None:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
