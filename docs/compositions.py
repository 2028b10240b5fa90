"""Compare every composition of mesh axes with one process and write the table of docs/concepts/parallelism.md.

python docs/compositions.py      some minutes on two cores; exits with 1, writing nothing, if one is not equal
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.agent.parity import MeshParity, ParityReport, check_parity
from headway.agent.parity_compare import Kind
from headway.cli.check_view import check_lines
from headway.cli.mesh import parse_layout
from headway.data import BuildOptions, build_dataset
from headway.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "parallelism.md"
BEGIN, END = "<!-- made by docs/compositions.py: begin -->", "<!-- made by docs/compositions.py: end -->"
MESHES = (
    "replicate=2",
    "shard=2",
    "shard=3",
    "shard=2,keep_weights=true",
    "shard=2,reduce_each=true",
    "tensor=2",
    "tensor=4",
    "pipeline=2",
    "pipeline=2,schedule=interleaved",
    "pipeline=2,schedule=zero-bubble",
    "pipeline=2,stages=1:4",
    "pipeline=4",
    "replicate=2,shard=2",
    "replicate=2,tensor=2",
    "replicate=2,pipeline=2",
    "shard=2,tensor=2",
    "shard=2,pipeline=2",
    "shard=3,pipeline=2,schedule=zero-bubble",
    "tensor=2,pipeline=2",
    "tensor=2,pipeline=2,schedule=interleaved",
    "replicate=2,shard=2,tensor=2",
    "replicate=2,shard=2,pipeline=2",
    "replicate=2,tensor=2,pipeline=2,schedule=interleaved",
    "shard=2,tensor=2,pipeline=2",
    "shard=2,tensor=2,pipeline=2,schedule=zero-bubble",
)
EXPERTS = (
    "shard=2",
    "shard=2,expert=2",
    "shard=4,expert=2",
    "shard=4,expert=4",
    "replicate=2,shard=2,expert=2",
    "shard=2,expert=2,pipeline=2",
)
CONTEXT = (
    "context=2,shard=1,context_attention=all-gather",
    "context=2,shard=1,context_attention=all-to-all",
    "context=2,shard=1,context_attention=ring",
    "context=4,shard=1,context_attention=ring",
    "shard=2,context=2",
    "replicate=2,shard=1,context=2",
    "context=2,shard=1,tensor=2",
    "context=2,shard=1,pipeline=2",
    "context=2,shard=1,tensor=2,pipeline=2",
)
BFLOAT16 = ("shard=2", "tensor=2", "pipeline=2", "shard=2,tensor=2", "context=2,shard=1")
COLUMNS: tuple[Kind, ...] = ("loss", "gradient", "parameter")


def main() -> int:
    """Check all meshes, then write the page."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "json-package"
        build_dataset(data, [f"{Path(json.__file__).parent}/*.py"], BuildOptions(vocab_size=300))
        checks = [
            checked(data, "float32", (*MESHES, *CONTEXT)),
            checked(data, "bfloat16", BFLOAT16),
            checked(data, "float32", EXPERTS, "mixtral-small.toml"),
        ]
    for report in checks:
        print("\n".join(check_lines(report)))
    if not all(report.equal for report in checks):
        return 1
    write(PAGE, "\n".join(line for report in checks for line in section(report)))
    return 0


def checked(data: Path, dtype: str, meshes: Sequence[str], name: str = "check.toml") -> ParityReport:
    """Check a recipe in one precision on the given meshes."""
    recipe: Recipe = load_recipe(ROOT / "recipes" / name, [f"data.path={data}", f"train.dtype={dtype}"])
    layouts = [parse_layout(mesh) for mesh in meshes]
    return check_parity(
        recipe, layouts, data.parent / "runs", report=lambda text: print(text, file=sys.stderr, flush=True)
    )


def section(report: ParityReport) -> Iterator[str]:
    """Yield the table of one recipe and precision."""
    limits = [f"{report.tolerances.of(kind):.0e}".replace("e-0", "e-") for kind in COLUMNS]
    yield from (f"### {report.recipe}, {report.dtype}", "")
    yield f"| mesh | workers | loss (of {limits[0]}) | gradients (of {limits[1]}) | parameters (of {limits[2]}) |"
    yield "|---|---:|---:|---:|---:|"
    yield from (row(mesh) for mesh in report.meshes)
    yield ""


def row(mesh: MeshParity) -> str:
    """Return the row of a mesh: its largest differences."""
    assert mesh.verdict is not None, "failed meshes are not written"
    cells = " | ".join(f"{mesh.verdict.largest[kind].difference:.1e}" for kind in COLUMNS)
    return f"| {mesh.mesh} | {mesh.workers} | {cells} |"


def write(page: Path, table: str) -> None:
    """Replace the text between the page's marks; create a missing page."""
    if not page.exists():
        page.write_text(f"# Parallelism\n\n{BEGIN}\n{END}\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
