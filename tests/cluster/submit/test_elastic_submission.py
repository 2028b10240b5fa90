"""Elastic runs as they are submitted: sizes read and completed, and what the job asks for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headway.agent import new_run, resume_run
from headway.cluster.engines.engine import LaunchRequest, Machine
from headway.cluster.submit import runs as submitting
from headway.cluster.submit.elastic_runs import elastic_sizes, parse_sizes, relative_speeds
from headway.errors import UsageError
from headway.hardware import Devices, parse_on
from headway.recipe import Recipe
from headway.track import RunFolder, read_plan

EMULATED = [Machine(f"node-{number}", "free", gpus=4, cpus=3, groups=("fake",)) for number in (1, 2)]
Make = Callable[..., Recipe]


class Recorded:
    """An engine that remembers what it is asked to launch."""

    def __init__(self, machines: Sequence[Machine] = EMULATED) -> None:
        self.machines, self.requests = machines, list[LaunchRequest]()

    def inventory(self) -> Sequence[Machine]:
        return self.machines

    def launch(self, request: LaunchRequest) -> str:
        self.requests.append(request)
        return "1"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorded:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HEADWAY_ENGINES", raising=False)
    engine = Recorded()
    monkeypatch.setattr(submitting, "reach_engine", lambda _name, _root: engine)
    return engine


def test_elastic_run_asks_for_its_smallest_size_and_learns_the_rest(
    engine: Recorded, recipe: Make, tmp_path: Path
) -> None:
    site = {"sizes": "2:1,4:1.5,8:2", "preemptible": "yes"}
    elastic = recipe({"train.batch": 8})
    submitting.submit_run(elastic, tmp_path / "runs", parse_on("cpux2"), "service", "demo", site=site)
    (request,) = engine.requests
    assert (request.machines, request.gpus) == (1, 2)
    assert request.cpus == 3, "4 of its 8 workers are on a node at most, which has 3 CPUs"
    assert request.command[-1] == "--elastic"
    assert not {"--nodes", "--workers"} & set(request.command)
    assert dict(request.site) == site | {"spread": "yes"}
    run = RunFolder(tmp_path / "runs" / "demo")
    for workers in (8, 2):  # its first start may have any of its sizes
        assert resume_run(run, [], workers=workers).workers == workers
        plan = read_plan(run)
        assert plan is not None
        assert plan.devices == workers


def test_speeds_that_are_left_out_are_those_of_the_plans(engine: Recorded, recipe: Make, tmp_path: Path) -> None:
    large = recipe({"train.batch": 64, "model.layers": 12, "model.dim": 1024, "model.heads": 16, "model.kv_heads": 16})
    submitting.submit_run(large, tmp_path / "runs", parse_on("h100x1"), "service", "demo", site={"sizes": "1,2"})
    (request,) = engine.requests
    assert (request.gpus, request.cpus) == (1, 3), "each of 2 workers asks for 4 CPUs, and nodes have 3"
    plans = []
    for size in (1, 2):
        on = Devices("cuda", size, "h100")
        attempt = new_run(large, tmp_path / f"{size}", workers=size, on=on)
        plans.append(read_plan(attempt.folder))
    one, two = (plan.tokens_s for plan in plans if plan is not None)
    assert request.site["sizes"] == f"1:1,2:{two / one:.4g}"


def test_run_without_sizes_asks_as_before(engine: Recorded, recipe: Make, tmp_path: Path) -> None:
    submitting.submit_run(recipe(), tmp_path / "runs", parse_on("cpux1x2"), "service", "demo", site={})
    (request,) = engine.requests
    assert (request.machines, request.gpus) == (2, 0)
    assert request.command[-4:] == ("--nodes", "2", "--workers", "2")
    assert "sizes" not in request.site


def test_refused_sizes_leave_no_run(engine: Recorded, recipe: Make, tmp_path: Path) -> None:
    for site, words in (
        ({"sizes": "2:1,3:1.5"}, "cannot have 3 GPUs"),
        ({"sizes": "4:1,8:1.5"}, "the smallest size is 4 GPUs"),
        ({"sizes": "2,4"}, "predicted to be no faster"),  # a CPU's cores are the same, however many share them
    ):
        with pytest.raises(UsageError, match=words):
            submitting.submit_run(
                recipe({"train.batch": 8}), tmp_path / "runs", parse_on("cpux2"), "service", "demo", site=site
            )
    assert not engine.requests
    assert not list((tmp_path / "runs").iterdir())


def test_run_on_cpus_never_holds_real_gpus(recipe: Make) -> None:
    real = [Machine("gpu-1", "free", gpus=8, cpus=64, groups=("h100",))]
    with pytest.raises(UsageError, match="node gpu-1 has real ones"):
        elastic_sizes(recipe(), parse_on("cpux1"), "1:1,2:1.5", real)


@pytest.mark.parametrize("text", ["", "2,,4", "4:1,2:2", "2,2", "0:1", "2:fast", "a:1", "-1", "2:1,4"])
def test_sizes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"sizes are|has no speed") as refused:
        parse_sizes("demo", text)
    assert "8,16,32 or 8:1,16:1.9,32:3.4" in str(refused.value.hint)


def test_speeds_are_as_stated_else_relative_to_the_smallest_size() -> None:
    tokens_s = {8: 80e3, 16: 150e3, 32: 240e3}
    assert relative_speeds("demo", parse_sizes("demo", "8,16,32"), tokens_s) == ((8, 1.0), (16, 1.875), (32, 3.0))
    assert relative_speeds("demo", parse_sizes("demo", "8:1, 16:1.6"), tokens_s) == ((8, 1.0), (16, 1.6))
    with pytest.raises(UsageError, match="32 GPUs are predicted to be no faster than 16"):
        relative_speeds("demo", parse_sizes("demo", "8,16,32"), tokens_s | {32: 150e3})
