"""Break one line at a time in a copy of the sources, and see whether the default suite notices: `make mutants`.

    python tests/mutants.py            # all of them
    python tests/mutants.py clip       # those whose name has this word

Each mutant is run against the default tests that should notice it and, if they do not, against all of its package,
until the first one fails: what these catch, `make test` catches. A mutant that survives shows a hole in the suite.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and what it is replaced by."""

    name: str
    file: str
    line: str
    becomes: str
    near: str
    """The tests that should notice it, below tests/."""

    @property
    def package(self) -> str:
        return self.file.split("/")[0]


MUTANTS = [
    Mutant("restarts without progress never end", "agent/supervise/recover.py",
           "if failure.reached > furthest:", "if failure.reached >= furthest:",
           "agent/supervise/test_recover.py"),
    Mutant("a leader takes its own lease for another's", "agent/nodes/lease.py",
           "return max(_numbers(self.folder), default=0) > self.number",
           "return max(_numbers(self.folder), default=0) >= self.number",
           "agent/nodes/test_lease.py"),
    Mutant("silence is counted though a worker moves", "agent/supervise/hang_detector.py",
           "advances = at_ns != heartbeat.at_ns or heartbeat.progress != behind",
           "advances = at_ns != heartbeat.at_ns and heartbeat.progress != behind",
           "agent/supervise/test_hang_detector.py"),
    Mutant("a half overwritten snapshot is restored", "agent/saving/snapshots.py",
           "if snapshot is not None and all(", "if snapshot is not None and any(",
           "agent/saving/test_snapshots.py"),
    Mutant("a former leader commits", "state/write_checkpoint.py",
           "if (refused := refusal()) is not None:", "if (refused := refusal()) is None:",
           "agent/nodes/test_lease.py"),
    Mutant("one checkpoint too many is removed", "state/write_checkpoint.py",
           "for entry in list_checkpoints(checkpoints)[:-keep_last]:",
           "for entry in list_checkpoints(checkpoints)[: 1 - keep_last or None]:",
           "state/test_write_checkpoint.py"),
    Mutant("damaged bytes of a tensor are not noticed", "state/read_checkpoint.py",
           "if xxhash.xxh3_64_hexdigest(out[begin : begin + chunk]) != piece.xxh3[number]:",
           "if xxhash.xxh3_64_hexdigest(out[begin : begin + chunk]) in piece.xxh3 and False:",
           "state/test_read_checkpoint.py"),
    Mutant("a backfilled job delays the reserved one", "cluster/scheduler/decide.py",
           "short = bool(jobs.limit_s[row] - jobs.ran_s[row] <= gap)",
           "short = bool(jobs.limit_s[row] - jobs.ran_s[row] <= gap + 60)",
           "cluster/scheduler/test_decide_table.py"),
    Mutant("GPUs in use count for a tenant and not for its parents", "cluster/scheduler/tenants.py",
           "for tenant in self._paths[row].tolist():  # one or two: faster than an array",
           "for tenant in self._paths[row].tolist()[:1]:",
           "cluster/scheduler/test_tenants.py"),
    Mutant("a cancelled job that waits is shown as waiting", "cluster/engines/slurm/parse.py",
           "        if script.cancelled:", "        if script.cancelled and script.starts > 1:",
           "cluster/engines/test_slurm_parse.py"),
    Mutant("gradients of a step are added to the next one's", "train/loop.py",
           "optimizer.zero_grad(set_to_none=True)", "None if step % 2 else optimizer.zero_grad(set_to_none=True)",
           "train/test_optimizer_in_backward.py"),
    Mutant("warm-up is one step late", "train/schedule.py",
           "return train.lr * step / train.warmup_steps", "return train.lr * (step - 1) / train.warmup_steps",
           "train/test_schedule.py"),
    Mutant("gradients are clipped at half the norm that the recipe says", "train/loop.py",
           "clip(optimizer, parameters.values(), norm, recipe.train.clip)",
           "clip(optimizer, parameters.values(), norm, recipe.train.clip / 2)",
           "train/test_custom_models.py"),
]  # fmt: skip


def run_mutant(mutant: Mutant, copy: Path, testers: int) -> tuple[str, float]:
    """The test that caught it, or nothing; and how many seconds that took."""
    path = copy / "src/headway" / mutant.file
    intact = path.read_text()
    assert intact.count(mutant.line) == 1, f"not once in {mutant.file}: {mutant.line}"
    path.write_text(intact.replace(mutant.line, mutant.becomes))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "--dist", "loadfile"]
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.monotonic()
    try:
        for tests, processes in ((mutant.near, 0), (mutant.package, testers)):
            words = [*command, "-n", str(processes), f"tests/{tests}"]
            run = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
            assert failed or run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
            if failed:
                return failed[0], time.monotonic() - started
    finally:
        path.write_text(intact)
    return "", time.monotonic() - started


def main(word: str = "") -> int:
    """The exit status: 1 where a mutant survives."""
    chosen = [mutant for mutant in MUTANTS if word in mutant.name]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "headway"
        ignore = shutil.ignore_patterns(".venv", ".git", "runs", "data", "__pycache__", ".*_cache", ".gpu-site")
        shutil.copytree(ROOT, copy, ignore=lambda where, names: ignore(where, names) if Path(where) == ROOT else [])
        for mutant in chosen:
            test, seconds = run_mutant(mutant, copy, testers=2 * (os.cpu_count() or 1))
            survivors += not test
            print(f"{'caught' if test else 'SURVIVED':<9}{mutant.file}: {mutant.name}", flush=True)
            print(f"         {test or 'no default test failed'} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
