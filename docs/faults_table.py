"""Strikes small runs with every fault, beside torchrun, and writes the tables of docs/concepts/faults.md.

python docs/faults_table.py                              an hour and more on two cores; wants the demo's data
python docs/faults_table.py FILE.json ...                the same, of what `headway chaos ... --json` has printed:
                                                         rows of later files take the place of earlier ones

Exits 1 when a fault did not end as it must.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "faults.md"
BEGIN, END = "<!-- made by docs/faults_table.py: begin -->", "<!-- made by docs/faults_table.py: end -->"
MATRIX = ("--repeat", "10", "--beside", "torchrun")
RANDOM = ("--random", "200")


def main(files: Sequence[str]) -> int:
    """Have what is needed, write the page."""
    if files:
        documents = [json.loads(Path(file).read_bytes()) for file in files]
    else:
        documents = [strike(*MATRIX), strike(*RANDOM)]
    matrices = [document for document in documents if "step_s" in document]
    random = [document for document in documents if "step_s" not in document]
    lines = [*table(merged(matrices)), *(line for document in random for line in long(document))]
    write(PAGE, "\n".join(lines))
    return 0 if all(document["met"] for document in documents) else 1


def strike(*options: str) -> dict[str, Any]:
    """What the verb prints."""
    command = [sys.executable, "-m", "headway.cli.main", "chaos", "recipes/chaos.toml", *options, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE).stdout)
    return found


def merged(matrices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first matrix with rows of the others in their places."""
    faults = {row["name"]: row for matrix in matrices for row in matrix["faults"]}
    beside = {row["name"]: row for matrix in matrices for row in matrix["beside"]}
    return {**matrices[0], "faults": [*faults.values()], "beside": [*beside.values()]}


def table(document: dict[str, Any]) -> Iterator[str]:
    """A row for each fault."""
    step = 1e3 * document["step_s"]
    yield f"{document['workers']} workers on two cores, steps of {step:.0f} ms; medians of the tries:"
    yield ""
    yield "| fault | noticed | stepping | redone | lost | as it must | torchrun: stepping |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    beside = {row["name"]: row for row in document["beside"]}
    for row in document["faults"]:
        cells = [
            row["what"],
            seconds(row["noticed_s"]),
            seconds(row["stepping_s"]),
            f"{row['redone']:g}",
            seconds(row["lost_s"]),
            f"{row['met']} of {len(row['tries'])}",
            peer(beside.get(row["name"])),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def peer(row: dict[str, Any] | None) -> str:
    """How torchrun took the same."""
    if row is None:
        return ""
    often = f"{row['recovered']} of {len(row['tries'])}"
    return f"{seconds(row['stepping_s'])}, {often}" if row["recovered"] else often


def seconds(value: float | None) -> str:
    """Two digits or so."""
    return "-" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def long(document: dict[str, Any]) -> Iterator[str]:
    """What many faults in a row came to."""
    verdict = "the same chain and digest as without any" if document["met"] else "NOT as it must be"
    yield f"{document['struck']} of {document['faults']} random faults struck one run of {document['steps']} steps, "
    yield f"in {document['attempts']} attempts: {verdict}."
    yield ""


def write(page: Path, text: str) -> None:
    """Put the tables where the page has its marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
