"""Formats a parity check: lines for one mesh, a table for several, or JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from headway.agent.parity import MeshParity, ParityReport
from headway.agent.parity_compare import KINDS, Finding, Kind, Verdict
from headway.cli.text import columns

NAMES: dict[Kind, str] = {
    "forward": "forward",
    "loss": "loss",
    "gradient": "gradients",
    "parameter": "parameters",
    "adamw": "after AdamW",
}
COLUMNS: tuple[Kind, ...] = ("loss", "gradient", "parameter")
MESH_WIDTH = 34


def check_lines(checked: ParityReport) -> list[str]:
    """Return a check as text."""
    steps = f"{checked.steps} step{'s' if checked.steps > 1 else ''}"
    if len(checked.meshes) == 1:
        (mesh,) = checked.meshes
        return [f"one process against {mesh.mesh}, {steps}, {checked.dtype}", *_details(mesh), _end(checked)]
    lines = [f"one process against {len(checked.meshes)} meshes, {steps}, {checked.dtype}", *_table(checked)]
    for mesh in checked.meshes:
        if not mesh.equal:
            lines += ["", mesh.mesh, *_details(mesh)]
    return [*lines, "", _end(checked)] if not checked.equal else [*lines, _end(checked)]


def _details(mesh: MeshParity) -> Iterator[str]:
    """Yield the largest difference of each kind of a mesh, and the first difference."""
    if mesh.verdict is None:
        yield f"  failed: {mesh.error}"
        if mesh.hint:
            yield f"  hint:   {mesh.hint}"
        return
    for kind in KINDS:
        if kind in mesh.verdict.largest:
            yield _row(kind, mesh.verdict.largest[kind])
    if mesh.verdict.first is not None:
        yield f"  first difference: {mesh.verdict.first.sentence}"


def _row(kind: Kind, largest: Finding) -> str:
    """Return the largest difference of a kind; a wide name comes on a separate line."""
    state = "DIFFERS" if largest.differs else "ok"
    row = f"  {NAMES[kind]:<12}  {_number(largest.difference)} of {_short(largest.tolerance):<5}  {state:<7}"
    if not largest.name:
        return row.rstrip()
    location = f"largest: {largest.name}"
    return f"{row}  {location}" if len(row) + 2 + len(location) <= columns() else f"{row.rstrip()}\n      {location}"


def _table(checked: ParityReport) -> Iterator[str]:
    """Yield one line per mesh, or two if its name is wide."""
    width = min(MESH_WIDTH, max(len("(allowed)"), *(len(mesh.mesh) for mesh in checked.meshes)))
    yield f"  {'mesh':<{width}}" + "".join(f"  {NAMES[kind]:>10}" for kind in COLUMNS)
    allowed = "".join(f"  {_short(checked.tolerances.of(kind)):>10}" for kind in COLUMNS)
    yield f"  {'(allowed)':<{width}}{allowed}"
    for mesh in checked.meshes:
        wide = len(mesh.mesh) > width
        if wide:
            yield f"  {mesh.mesh}"
        yield f"  {'' if wide else mesh.mesh:<{width}}{_cells(mesh)}"


def _cells(mesh: MeshParity) -> str:
    if mesh.verdict is None:
        return "  failed"
    numbers = [_number(mesh.verdict.largest[kind].difference) for kind in COLUMNS]
    return "".join(f"  {number:>10}" for number in numbers) + ("  ok" if mesh.equal else "  DIFFERS")


def _end(checked: ParityReport) -> str:
    unequal = [mesh for mesh in checked.meshes if not mesh.equal]
    if not unequal:
        return "equal."
    failed = sum(mesh.verdict is None for mesh in unequal)
    if len(checked.meshes) == 1:
        return "not compared: the trial failed." if failed else "not equal."
    return f"{len(checked.meshes) - len(unequal)} of {len(checked.meshes)} equal" + (
        f", {failed} failed." if failed else "."
    )


def _number(value: float) -> str:
    return f"{value:.1e}"


def _short(tolerance: float) -> str:
    """Return a tolerance as 1e-5."""
    return f"{tolerance:.0e}".replace("e-0", "e-")


# -- JSON


def as_json(checked: ParityReport) -> dict[str, Any]:
    """Return everything that a check found as JSON-ready values."""
    return {
        "recipe": checked.recipe,
        "steps": checked.steps,
        "dtype": checked.dtype,
        "device": checked.device,
        "tolerances": {kind: checked.tolerances.of(kind) for kind in KINDS} | {"noise": checked.tolerances.noise},
        "losses": list(checked.losses),
        "equal": checked.equal,
        "meshes": [_mesh(mesh) for mesh in checked.meshes],
    }


def _mesh(mesh: MeshParity) -> dict[str, Any]:
    return {
        "mesh": mesh.mesh,
        "parallel": mesh.parallel.model_dump(),
        "workers": mesh.workers,
        "microbatch": mesh.microbatch,
        "seconds": mesh.seconds,
        "equal": mesh.equal,
        **_verdict(mesh.verdict),
        "error": mesh.error,
        "hint": mesh.hint,
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"largest": None, "first": None}
    return {
        "largest": {kind: asdict(finding) for kind, finding in verdict.largest.items()},
        "first": None if verdict.first is None else asdict(verdict.first),
    }
