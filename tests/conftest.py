"""What tests of whole runs share: a small data set, a warm zygote, and recipes that take seconds."""

import atexit
import gc
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long a machine takes says nothing about what it computes. The same examples on every run of `make test`, so that
# it fails for what a change did; `make test-all` draws others each time.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="HEADWAY_TEST_ALL" not in os.environ,
)
settings.load_profile("patient")
pytest_plugins = ["cpu_time", "dashboard_clients"]
pytest.register_assert_rewrite("engine_suite")  # which is imported by the files of the engines' tests
# Before anything imports a kernel: without a GPU, Triton's own interpreter runs them.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
# Testers are as many as cores: second threads would only wait for each other, which takes as much of a core as work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in workers: on ARM oneDNN leaves /tmp/perf-PID.map behind every process that computes, and tests start thousands.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
# The index of runs, which the user's own must not be; child processes share it.
if "HEADWAY_CACHE" not in os.environ:
    os.environ["HEADWAY_CACHE"] = tempfile.mkdtemp(prefix="headway-cache-")
    atexit.register(shutil.rmtree, os.environ["HEADWAY_CACHE"], ignore_errors=True)

from headway.agent import Attempt, AttemptOutcome, new_run, resume_run, supervise_run
from headway.agent.workers.zygote import ZygoteClient
from headway.data import BuildOptions, build_dataset
from headway.recipe import FaultPlan, Recipe
from headway.recipe.load import parse_recipe
from headway.track import RunFolder, read_run

TINY: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1},
    "data": {"seq": 32},
    "train": {"steps": 8, "batch": 8, "lr": 1e-2, "warmup_steps": 1, "restarts": 0},
    "checkpoint": {"every_steps": 0, "retry_s": 0},
}


def pytest_configure() -> None:
    # Shells have what they start in the background ignore Ctrl-C, and programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # what is imported and collected stays, so that looking for garbage in it is waste


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, as `--dist loadfile` says, but few testers get those that need a process with everything imported.

    What ranks are forked from takes six CPU-seconds to start, a zygote five. Half of the testers get the whole runs.
    """
    from xdist.scheduler import LoadFileScheduling

    halves = max(1, (config.getvalue("numprocesses") or 1) // 2)
    scopes: dict[str, str] = {}

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file not in scopes:
                source = (config.rootpath / file).read_text()
                runs = sum(scope.startswith("runs-") for scope in scopes.values())
                forks, trains = "run_ranks" in source, re.search(r"\b((make_)?lab|zygote)\b", source)
                scopes[file] = "ranks" if forks else f"runs-{runs % halves}" if trains else file
            return scopes[file]

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of a few ten thousand tokens, made of the standard library's json package."""
    folder = tmp_path_factory.mktemp("data") / "json-package"
    build_dataset(folder, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
    return folder


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    """Workers are forked from here, so that a test pays for a run and not for importing torch.

    They find `own_models` and `own_environments`, as those of a user who has set PYTHONPATH.
    """
    paths = [
        *(str(Path(__file__).parent / folder) for folder in ("train", "rl")),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    process = ZygoteClient.start(tmp_path_factory.mktemp("zygote") / "log", environment)
    while not process.ready(timeout_s=60):
        pass
    yield process
    process.close()


@pytest.fixture(scope="session")
def recipe(dataset: Path) -> Callable[..., Recipe]:
    """Makes tiny recipes: `recipe({"train.steps": 3})`."""

    def make(settings: dict[str, Any] | None = None) -> Recipe:
        values = {section: dict(fields) for section, fields in TINY.items()}
        values["data"]["path"] = str(dataset)
        for key, value in (settings or {}).items():
            section, _, name = key.rpartition(".")
            (values.setdefault(section, {}) if section else values)[name] = value
        return parse_recipe(values, {}, "test")

    return make


class Lab:
    """Runs recipes to their end in a folder of their own."""

    def __init__(self, root: Path, zygote: ZygoteClient) -> None:
        self.root, self._zygote = root, zygote

    def train(self, recipe: Recipe, workers: int = 1, faults: FaultPlan | None = None, **options: Any) -> "Lived":
        """A new run's first attempt."""
        return self._live(new_run(recipe, self.root, workers=workers, **options), faults)

    def resume(self, run: RunFolder, *settings: str, faults: FaultPlan | None = None, **options: Any) -> "Lived":
        """A run's next attempt."""
        return self._live(resume_run(run, list(settings), **options), faults)

    def _live(self, attempt: Attempt, faults: FaultPlan | None) -> "Lived":
        attempt = attempt.model_copy(update={"threads": 1, "faults": faults or FaultPlan()})
        return Lived(attempt.folder, supervise_run(attempt, warm=self._zygote))


class Lived:
    """An attempt that has ended."""

    def __init__(self, run: RunFolder, outcome: AttemptOutcome) -> None:
        self.run, self.outcome = run, outcome

    @property
    def ways_on(self) -> list[str]:
        """How it went on after each attempt that failed."""
        return [event["recovery"] for event in self.events("end", "agent") if "recovery" in event]

    def events(self, kind: str, process: str = "rank-0") -> list[dict[str, Any]]:
        """All events of a kind, over all attempts."""
        records = [record for record in read_run(self.run) if record.header.process == process]
        return [event for record in records for event in record.events if event["kind"] == kind]

    @property
    def digest(self) -> str:
        """Of the last checkpoint."""
        return str(self.events("checkpoint", "agent")[-1]["digest"])

    @property
    def chain(self) -> str:
        """After the last step."""
        return str(self.events("step")[-1]["chain"])


def when(there: Callable[[], Any], *acts: Callable[[], Any], patience_s: float = 300) -> None:
    """Do something, from beside, once there is something, or when patience ends."""

    def wait() -> None:
        deadline = time.monotonic() + patience_s
        while not there() and time.monotonic() < deadline:
            time.sleep(0.005)
        for act in acts:
            act()

    threading.Thread(target=wait).start()


def send(number: signal.Signals) -> Callable[[], None]:
    """Sends a signal to this process, which is the agent of the runs it lives through."""
    return lambda: os.kill(os.getpid(), number)


def recorded(root: Path, kind: str, step: int, process: str = "rank-0") -> bool:
    """Whether a run below a folder has this step in its record by now."""
    words = (f'"kind":"{kind}"', f'"step":{step},')
    lines = [line for path in root.glob(f"*/events/*-{process}.jsonl") for line in path.read_text().splitlines()]
    return any(all(word in line for word in words) for line in lines)


def left_alone(root: Path, make_lab: Callable[[Path], Lab], recipe: Recipe) -> dict[int, Lived]:
    """Runs of a recipe by one and by two workers that nothing happened to, to hold others against."""
    found = {}
    for workers in (1, 2):
        found[workers] = make_lab(root).train(recipe, workers=workers)
        assert found[workers].outcome.state == "finished", found[workers].outcome
    return found


def assert_same(lived: Lived, other: Lived) -> None:
    """A run ended as another did, bit for bit."""
    assert lived.outcome.state == "finished", lived.outcome
    assert (lived.chain, lived.digest) == (other.chain, other.digest)


@pytest.fixture(scope="session")
def make_lab(zygote: ZygoteClient) -> Callable[[Path], Lab]:
    """Makes places to run recipes."""
    return lambda root: Lab(root, zygote)


@pytest.fixture
def lab(tmp_path: Path, make_lab: Callable[[Path], Lab]) -> Lab:
    """A place to run recipes."""
    return make_lab(tmp_path / "runs")
