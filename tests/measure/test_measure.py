"""The measuring program on this machine's CPU: in this process, and (slow) as the command starts it, which has it
measure collectives between two processes."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.cli import hardware
from headway.errors import RunError
from headway.hardware import Ceilings, read_ceilings
from headway.hardware.ceilings import CollectiveCurve
from headway.measure.collectives import collectives
from headway.measure.device import CPU_QUICK, GPU, _sustained, main, measure
from headway.measure.operations import LAYOUTS, OperandPool, gemm_work, layer_shapes
from headway.measure.timer import DeviceTimer

CPU = torch.device("cpu")


TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def pretend(kind: str, ranks: int, sizes: Sequence[int]) -> list[CollectiveCurve]:
    """Fake collectives."""
    curve = {"ranks": ranks, "backend": "gloo", "bytes": tuple(sizes), "microseconds": (10.0,) * len(sizes)}
    return [CollectiveCurve.model_validate({"operation": operation, **curve}) for operation in TOGETHER]


def serve_here(request: dict[str, Any]) -> Ceilings:
    """Serve a request in this process, and follow its output as the command does."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
        patch.setattr("headway.measure.device.collectives", pretend)
        assert main() == 0
    answer = hardware._follow(output.getvalue().splitlines())
    assert answer is not None
    return Ceilings.model_validate(answer["ceilings"])


@pytest.fixture(scope="module", params=["here", pytest.param("processes", marks=pytest.mark.slow)])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A quick measurement through the command: its file, and what it printed."""
    file = tmp_path_factory.mktemp("measured") / "here.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        if request.param == "here":
            patch.setattr(hardware, "_run_measure", serve_here)
        arguments = ["measure", "--quick", "--device", "cpu", "--ranks", "2", "--out", str(file)]
        done = CliRunner().invoke(hardware.app, arguments)
    assert done.exit_code == 0, done.output
    return file, done.stdout, done.stderr


def test_every_requested_ceiling_is_measured(measured: tuple[Path, str, str]) -> None:
    ceilings = read_ceilings(measured[0])
    sizes = CPU_QUICK.gemm["float32"]
    assert ceilings.skipped == {}
    assert (ceilings.kind, ceilings.chip, ceilings.timer) == ("cpu", None, "host clock")
    assert ceilings.torch == torch.__version__
    assert len(ceilings.gemm[0].microseconds) == len(sizes) ** 3
    assert [shape.layout for shape in ceilings.gemm_shapes] == list(LAYOUTS)
    assert {(curve.head_dim, curve.causal) for curve in ceilings.attention} == {(16, True), (16, False)}
    operations = {curve.operation for curve in ceilings.memory}
    assert {"copy", "add", "silu_mul", "rms_norm", "rotary", "adamw", "quantize"} <= operations
    assert [host.mode for host in ceilings.host] == ["plain"]
    together = {(curve.operation, curve.ranks, curve.backend) for curve in ceilings.collectives}
    assert together == {(name, 2, "gloo") for name in TOGETHER}
    best = max(ceilings.gemm_efficiency(m, n, k, "fp32") for m in sizes for n in sizes for k in sizes)
    assert best == pytest.approx(1.0)  # a CPU's peak is the best measured rate


def test_measure_output(measured: tuple[Path, str, str]) -> None:
    _, out, err = measured
    assert "measuring attention" in err
    assert "of peak at" in out
    assert "host time per layer, plain" in out
    assert f"wrote {measured[0]}" in out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (16, 16, 16), (1, 9, 2)])
def test_gemm_work_computes_the_product(layout: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    pool = OperandPool(CPU, "float32", 4096)
    product = gemm_work(pool, "float32", layout, m, n, k)(1)
    assert isinstance(product, torch.Tensor)
    assert product.shape == (m, n)
    a = pool.cut(k, m, 1).T if layout == "weight" else pool.cut(m, k, 1)
    b = pool.cut(n, k, 4).T if layout == "forward" else pool.cut(k, n, 4)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_operands_are_random_and_rotate() -> None:
    pool = OperandPool(CPU, "float32", 2**14)
    cuts = [pool.cut(8, 8, turn) for turn in range(8)]
    assert len({cut.data_ptr() for cut in cuts}) == 8
    assert all(0.5 < float(cut.std()) < 2 for cut in cuts)


def test_layers_of_the_full_grid_fit_in_the_pool() -> None:
    for tokens, outputs, inputs in GPU.shapes:
        assert max(tokens * inputs, outputs * inputs, tokens * outputs) < GPU.pool_elements
    assert layer_shapes([(8, 2, 24)], [4]) == [(4, 8, 8), (4, 2, 8), (4, 24, 8), (4, 8, 24)]


def test_seconds_are_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only work moves, by three milliseconds per call."""
    clock = [0.0]
    monkeypatch.setattr("headway.measure.timer.time.perf_counter", lambda: clock[0])

    def work(turn: int) -> None:
        clock[0] += 3e-3

    assert DeviceTimer(CPU).seconds(work) == pytest.approx(3e-3)
    assert DeviceTimer(CPU).host_seconds(work) == pytest.approx(3e-3)
    assert DeviceTimer(CPU).repeated_seconds(work, 7) == pytest.approx(3e-3)


def test_sustained_gemm_runs_for_the_requested_time() -> None:
    (run,) = _sustained(
        DeviceTimer(CPU, groups=3, group_s=1e-4), OperandPool(CPU, "float32", 2**14), "float32", 64, 0.02
    )
    assert run.size == 64
    assert run.flops_s > 0
    assert run.clock_mhz is None


def test_failing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\ncat > /dev/null\necho no such device >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stand_in))
    with pytest.raises(RunError, match="measuring collectives failed on device 0: no such device"):
        collectives("cpu", 2, [1024])


@pytest.mark.slow
def test_rank_that_fails_in_torch_is_named() -> None:
    with pytest.raises(RunError, match="measuring collectives failed on device 0"):
        collectives("no such device", 1, ["not a size"])  # type: ignore[list-item]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"device": "cuda", "quick": True, "ranks": 1})))
    assert main() == 1
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "torch cannot use a GPU here" in answer["error"]
    assert "--device cpu" in answer["hint"]


def test_command_follows_the_measuring_process(capsys: pytest.CaptureFixture[str]) -> None:
    lines = io.StringIO('{"progress": "products", "share": 0.0}\nnoise\n{"ceilings": {}}\n')
    assert hardware._follow(lines) == {"ceilings": {}}
    assert "measuring products" in capsys.readouterr().err
    assert hardware._follow(io.StringIO("")) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show"], ["gb300", "15000", "h200", "yes"]),
        (["show", "h100"], ["989.5 TFLOP/s", "nvlink", "450 GB/s", "data sheet"]),
        (["show", "h200x8x64"], ["64 x 8 = 512 devices", "spine", "measured on NVIDIA H200"]),
        (["show", "--cluster", "recipes/clusters/h100-rail.toml"], ["h100-rail", "2:1 oversubscribed"]),
    ],
)
def test_show(arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    done = CliRunner().invoke(hardware.app, arguments)
    assert done.exit_code == 0, done.output
    assert all(word in done.stdout for word in expected)
    assert all(len(line) <= 110 for line in done.stdout.splitlines())
    as_json = CliRunner().invoke(hardware.app, [*arguments, "--json"])
    assert json.loads(as_json.stdout)


def test_out_of_memory_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sections(*_: Any) -> Any:
        yield "products", "gemm", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))

    monkeypatch.setattr("headway.measure.device._sections", sections)
    with pytest.raises(torch.OutOfMemoryError):
        measure(CPU, CPU_QUICK, 1, lambda *_: None)
