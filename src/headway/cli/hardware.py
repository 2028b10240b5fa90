"""`headway hardware show | measure`: known chips, and benchmarks of this machine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import typer

from headway.cli.options import Json
from headway.cli.text import columns, print_json
from headway.errors import RunError
from headway.hardware import CHIPS, Ceilings, Chip, devices, find_ceilings, load_cluster, parse_on, write_ceilings

app = typer.Typer(help="List known chips and benchmark this machine.", no_args_is_help=True)


@app.command("show")
def show_command(
    chip: Annotated[
        str | None,
        typer.Argument(metavar="[CHIP]", help="A chip or CHIPxPERNODExNODES (default: list all)."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help="Show this cluster.toml.")] = None,
    json: Json = False,
) -> None:
    """List known chips, or show one with its measured ceilings."""
    if chip is None and cluster is None:
        if json:
            print_json([_facts(known) for known in CHIPS])
        else:
            _print_table(CHIPS)
        return
    shown = load_cluster(cluster) if cluster is not None else parse_on(chip or "", default_node=True)
    ceilings = find_ceilings(shown.chip)
    if json:
        measured = _measured(ceilings) if ceilings else None
        print_json({**_facts(shown.chip), "cluster": shown.as_dict(), "measured": measured})
        return
    _print_chip(shown.chip)
    print(f"\n{shown.name}: {shown.nodes} x {shown.per_node} = {shown.devices} device{'s' * (shown.devices > 1)}")
    for level in shown.levels:
        print(f"  {level.describe()}")
    if ceilings:
        print()
        _print_measured(ceilings)


@app.command("measure")
def measure_command(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Output file (default: ceilings-CHIP.json).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Coarse grid: seconds instead of minutes.")] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="Device to benchmark; auto prefers a GPU."),
    ] = "auto",
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Devices in collectives (default: all GPUs; none on CPU).")
    ] = None,
    json: Json = False,
) -> None:
    """Benchmark this machine for the planner.

    Measures GEMMs, attention, memory, copies, host overhead and collectives.
    """
    local = devices(device)
    collective_ranks = ranks if ranks is not None else (local.count if local.kind == "cuda" else 1)
    ceilings = _run_measure({"device": local.kind, "quick": quick, "ranks": collective_ranks})
    file = out or Path(f"ceilings-{ceilings.chip or ceilings.kind}.json")
    write_ceilings(file, ceilings)
    if json:
        print_json({"file": str(file), **_measured(ceilings)})
        return
    _print_measured(ceilings)
    print(f"\nwrote {file}, {file.stat().st_size / 1e3:.0f} kB")


def _run_measure(request: dict[str, Any]) -> Ceilings:
    """Run the benchmark in a process with torch; it reports progress, then the result."""
    with subprocess.Popen(
        [sys.executable, "-m", "headway.measure.device"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
        answer = _follow(worker.stdout)
    if answer is None:
        answer = {"error": f"the benchmark failed with exit status {worker.returncode}", "hint": None}
    if "error" in answer:
        raise RunError(answer["error"], hint=answer["hint"])
    return Ceilings.model_validate(answer["ceilings"])


def _follow(lines: Any) -> dict[str, Any] | None:
    """Show progress until the last line, and return its answer."""
    answer, live, before = None, sys.stderr.isatty(), ""
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "progress" not in message:
            answer = message
        elif live:
            print(
                f"\r\x1b[Kmeasuring {message['progress']}  {message['share']:.0%}", end="", file=sys.stderr, flush=True
            )
        elif message["progress"] != before:
            print(f"measuring {message['progress']}", file=sys.stderr, flush=True)
            before = message["progress"]
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return answer


def _facts(chip: Chip) -> dict[str, Any]:
    return {
        "name": chip.name,
        "peaks": dict(chip.peaks),
        "memory_bytes": chip.memory_bytes,
        "bandwidth_bytes_s": chip.bandwidth_bytes_s,
        "links": [vars(link) for link in chip.links],
        "host_bytes_s": chip.host_bytes_s,
        "power_w": chip.power_w,
        "source": chip.source,
        "notes": dict(chip.notes),
    }


def _print_table(chips: tuple[Chip, ...]) -> None:
    print("chip           bf16    fp8    fp4    GiB   TB/s  link GB/s    watt  measured")
    for chip in chips:
        flops = [_tera(chip.peaks.get(name)) for name in ("bfloat16", "float8", "nvfp4")]
        link = chip.links[0]
        joined = f"{link.bandwidth_bytes_s / 1e9:.0f} x{link.devices}"
        print(
            f"{chip.name:<13}{flops[0]:>6}{flops[1]:>7}{flops[2]:>7}{chip.memory_bytes / 2**30:>7.0f}"
            f"{chip.bandwidth_bytes_s / 1e12:>7.2f}{joined:>11}{chip.power_w:>8.0f}  "
            f"{'yes' if find_ceilings(chip) else ''}".rstrip()
        )
    print("\nTFLOP/s dense; links per device and direction, and how many devices they connect")
    print("next: headway hardware show h100")


def _tera(flops: float | None) -> str:
    if flops is None:
        return "-"
    return f"{flops / 1e12:.4g}" if flops < 1e15 else f"{flops / 1e12:.0f}"


def _print_chip(chip: Chip) -> None:
    print(chip.name)
    for name, peak in chip.peaks.items():
        print(f"  {name:<10}{_tera(peak):>8} TFLOP/s dense")
    print(f"  memory    {chip.memory_bytes / 2**30:>8.0f} GiB at {chip.bandwidth_bytes_s / 1e12:.3g} TB/s")
    for link in chip.links:
        print(f"  {link.kind:<10}{link.bandwidth_bytes_s / 1e9:>8.0f} GB/s per direction among {link.devices}")
    print(f"  host      {chip.host_bytes_s / 1e9:>8.0f} GB/s per direction")
    print(f"  power     {chip.power_w:>8.0f} W")
    print(fill(f"source: {chip.source}", columns(), initial_indent="  ", subsequent_indent="    "))
    for figure, note in chip.notes.items():
        print(f"  {figure}: {note}")


def _measured(ceilings: Ceilings) -> dict[str, Any]:
    """Return the main figures of a measurement."""
    return {
        "device": ceilings.device,
        "chip": ceilings.chip,
        "torch": ceilings.torch,
        "gemm": {name: _best_gemm(ceilings, name) for name in ceilings.precisions()},
        "sustained": {run.precision: run.flops_s for run in ceilings.sustained},
        "attention": list(_attention_rows(ceilings)),
        "memory_bytes_s": {m.operation: ceilings.memory_bytes_s(m.bytes[-1], m.operation) for m in ceilings.memory},
        "copies_bytes_s": {
            f"{c.direction}{'' if c.pinned else ' pageable'}": c.bytes[-1] / c.microseconds[-1] * 1e6
            for c in ceilings.copies
        },
        "layer_host_us": {h.mode: [h.forward_microseconds, h.backward_microseconds] for h in ceilings.host},
        "launch_us": ceilings.launch_microseconds,
        "collectives_bytes_s": {
            f"{c.operation} x{c.ranks}": c.bytes[-1] / c.microseconds[-1] * 1e6 for c in ceilings.collectives
        },
        "skipped": ceilings.skipped,
    }


def _best_gemm(ceilings: Ceilings, precision: str) -> dict[str, Any]:
    grid = next(grid for grid in ceilings.gemm if grid.precision == precision)
    points = [(m, n, k) for m in grid.m for n in grid.n for k in grid.k]
    shape = max(points, key=lambda point: ceilings.gemm_efficiency(point[0], point[1], point[2], precision))
    efficiency = ceilings.gemm_efficiency(shape[0], shape[1], shape[2], precision)
    return {
        "points": len(points),
        "best": list(shape),
        "efficiency": efficiency,
        "flops_s": efficiency * ceilings.peaks[precision],
    }


def _attention_rows(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    for curve in ceilings.attention:
        grouped = curve.kv_heads < curve.heads
        rates = [
            ceilings.attention_flops(curve.seq[-1], curve.head_dim, curve.causal, backward, curve.backend, grouped)
            for backward in (False, True)
        ]
        yield {
            "backend": curve.backend,
            "head_dim": curve.head_dim,
            "causal": curve.causal,
            "grouped": grouped,
            "seq": curve.seq[-1],
            "forward_flops_s": rates[0],
            "backward_flops_s": rates[1],
        }


def _print_measured(ceilings: Ceilings) -> None:
    measured = _measured(ceilings)
    print(f"measured on {measured['device']}, torch {measured['torch']}")
    for name, best in measured["gemm"].items():
        size = " x ".join(map(str, best["best"]))
        sustained = measured["sustained"].get(name)
        after = f", {_tera(sustained)} sustained" if sustained else ""
        print(f"  {name:<10}{_tera(best['flops_s']):>8} TFLOP/s, {best['efficiency']:.1%} of peak at {size}{after}")
    for row in measured["attention"]:
        labels = [row["backend"], f"heads of {row['head_dim']}", "causal" if row["causal"] else "full"]
        labels += ["grouped"] if row["grouped"] else []
        rates = f"{_tera(row['forward_flops_s'])} / {_tera(row['backward_flops_s'])}"
        print(f"  attention {rates:>16} TFLOP/s forward / backward at {row['seq']}: {', '.join(labels)}")
    for name, rate in measured["memory_bytes_s"].items():
        print(f"  {name:<18}{rate / 1e9:>8.4g} GB/s")
    for name, rate in measured["copies_bytes_s"].items():
        print(f"  {name:<18}{rate / 1e9:>8.3g} GB/s")
    for mode, (forward, backward) in measured["layer_host_us"].items():
        print(f"  host time per layer, {mode}: {forward:.0f} us forward, {backward:.0f} us backward")
    for name, rate in measured["collectives_bytes_s"].items():
        print(f"  {name:<18}{rate / 1e9:>8.3g} GB/s")
    for what, reason in measured["skipped"].items():
        print(f"  not measured: {what}: {reason}")
