"""`headway hardware show | measure`: what chips can do by their data sheets, and what this machine's do in fact."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.cli.options import Json

if TYPE_CHECKING:
    from headway.hardware import Ceilings, Chip

__all__ = ["app"]

app = typer.Typer(help="Show chips and measure this machine's.", no_args_is_help=True)


@app.command("show")
def show_command(
    chip: Annotated[
        str | None,
        typer.Argument(metavar="[CHIP]", help="A chip's name, or CHIPxPERNODExNODES; without it all are listed."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help="Show this cluster.toml.")] = None,
    json: Json = False,
) -> None:
    """List the chips Headway knows, or show one: peaks, memory, links, the usual cluster, measured ceilings."""
    from headway.cli.text import print_json
    from headway.hardware import CHIPS, find_ceilings, load_cluster, parse_on

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
        Path | None, typer.Option("--out", metavar="FILE", help="Write here (default: ceilings-CHIP.json).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A coarse grid: seconds instead of minutes.")] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="What to measure; auto takes a GPU if there is one."),
    ] = "auto",
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Devices in collectives (default: all GPUs; on a CPU none).")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine's device: products, attention, memory, copies, host, collectives; for the planner."""
    from headway.cli.text import print_json
    from headway.hardware import devices, write_ceilings

    found = devices(device)
    together = ranks if ranks is not None else (found.count if found.kind == "cuda" else 1)
    ceilings = _run_measure({"device": found.kind, "quick": quick, "ranks": together})
    file = out or Path(f"ceilings-{ceilings.chip or ceilings.kind}.json")
    write_ceilings(file, ceilings)
    if json:
        print_json({"file": str(file), **_measured(ceilings)})
        return
    _print_measured(ceilings)
    print(f"\nwrote {file}, {file.stat().st_size / 1e3:.0f} kB")


def _run_measure(request: dict[str, Any]) -> "Ceilings":
    """Have a process that knows tensors do the work; it tells how far it is, and at last what it found."""
    import json
    import subprocess

    from headway.errors import RunError
    from headway.hardware import Ceilings

    with subprocess.Popen(
        [sys.executable, "-m", "headway.measure.device"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
        answer = _follow(worker.stdout)
    if answer is None:
        answer = {"error": f"the measurement stopped with exit status {worker.returncode}", "hint": None}
    if "error" in answer:
        raise RunError(answer["error"], hint=answer["hint"])
    return Ceilings.model_validate(answer["ceilings"])


def _follow(lines: Any) -> dict[str, Any] | None:
    """The last line's answer; shows progress on the terminal until it comes."""
    import json

    answer, live, before = None, sys.stderr.isatty(), ""
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if "progress" not in said:
            answer = said
        elif live:
            print(f"\r\x1b[Kmeasuring {said['progress']}  {said['share']:.0%}", end="", file=sys.stderr, flush=True)
        elif said["progress"] != before:
            print(f"measuring {said['progress']}", file=sys.stderr, flush=True)
            before = said["progress"]
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return answer


def _facts(chip: "Chip") -> dict[str, Any]:
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


def _print_table(chips: tuple["Chip", ...]) -> None:
    from headway.hardware import find_ceilings

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
    print("\nTFLOP/s dense; links per device and direction, and how many devices they join")
    print("next: headway hardware show h100")


def _tera(flops: float | None) -> str:
    if flops is None:
        return "-"
    return f"{flops / 1e12:.4g}" if flops < 1e15 else f"{flops / 1e12:.0f}"


def _print_chip(chip: "Chip") -> None:
    print(chip.name)
    for name, peak in chip.peaks.items():
        print(f"  {name:<10}{_tera(peak):>8} TFLOP/s dense")
    print(f"  memory    {chip.memory_bytes / 2**30:>8.0f} GiB at {chip.bandwidth_bytes_s / 1e12:.3g} TB/s")
    for link in chip.links:
        print(f"  {link.kind:<10}{link.bandwidth_bytes_s / 1e9:>8.0f} GB/s a direction among {link.devices}")
    print(f"  host      {chip.host_bytes_s / 1e9:>8.0f} GB/s a direction")
    print(f"  power     {chip.power_w:>8.0f} W")
    print(f"  source: {chip.source}")
    for figure, note in chip.notes.items():
        print(f"  {figure}: {note}")


def _measured(ceilings: "Ceilings") -> dict[str, Any]:
    """The few figures that say most, of all that was measured."""
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


def _best_gemm(ceilings: "Ceilings", precision: str) -> dict[str, Any]:
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


def _attention_rows(ceilings: "Ceilings") -> Iterator[dict[str, Any]]:
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


def _print_measured(ceilings: "Ceilings") -> None:
    found = _measured(ceilings)
    print(f"measured on {found['device']}, torch {found['torch']}")
    for name, best in found["gemm"].items():
        size = " x ".join(map(str, best["best"]))
        settled = found["sustained"].get(name)
        after = f", {_tera(settled)} sustained" if settled else ""
        print(f"  {name:<10}{_tera(best['flops_s']):>8} TFLOP/s, {best['efficiency']:.1%} of peak at {size}{after}")
    for row in found["attention"]:
        words = [row["backend"], f"heads of {row['head_dim']}", "causal" if row["causal"] else "full"]
        words += ["grouped"] if row["grouped"] else []
        rates = f"{_tera(row['forward_flops_s'])} / {_tera(row['backward_flops_s'])}"
        print(f"  attention {rates:>16} TFLOP/s forward / backward at {row['seq']}: {', '.join(words)}")
    for name, rate in found["memory_bytes_s"].items():
        print(f"  {name:<18}{rate / 1e9:>8.4g} GB/s")
    for name, rate in found["copies_bytes_s"].items():
        print(f"  {name:<18}{rate / 1e9:>8.3g} GB/s")
    for mode, (forward, backward) in found["layer_host_us"].items():
        print(f"  host of a layer, {mode}: {forward:.0f} us forward, {backward:.0f} us backward")
    for name, rate in found["collectives_bytes_s"].items():
        print(f"  {name:<18}{rate / 1e9:>8.3g} GB/s")
    for what, reason in found["skipped"].items():
        print(f"  not measured: {what}: {reason}")
