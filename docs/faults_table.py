"""Inject every fault into small runs, also under torchrun, and write the tables of docs/concepts/faults.md.

python docs/faults_table.py                 more than an hour on two cores; needs the data of `make chaos`
python docs/faults_table.py FILE.json ...   the same, from the output of `headway chaos ... --json`;
                                            rows of later files replace earlier ones, and tables without a file stay

Exits with 1 if a run did not recover as expected.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.chaos.cases import CASES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "faults.md"
MARKS = {
    "chaos": ("<!-- made by docs/faults_table.py: begin -->", "<!-- made by docs/faults_table.py: end -->"),
    "chaos-rl": ("<!-- made by docs/faults_table.py: begin policies -->", "<!-- end policies -->"),
}
"""Around what is written of each recipe."""
MATRIX = ("--repeat", "10", "--beside", "torchrun")
RANDOM = ("--random", "200")
POLICIES = ("--faults", ",".join(case.name for case in CASES if case.policy), "--repeat", "10")


def main(files: Sequence[str]) -> int:
    """Run or read the results and write the page."""
    if files:
        documents = [json.loads(Path(file).read_bytes()) for file in files]
    else:
        documents = [run_chaos("chaos", *MATRIX), run_chaos("chaos", *RANDOM), run_chaos("chaos-rl", *POLICIES)]
    for recipe, marks in MARKS.items():
        own = [document for document in documents if document["recipe"] == recipe]
        matrices = [document for document in own if "step_s" in document]
        random = [document for document in own if "step_s" not in document]
        if matrices:
            lines = [*table(merged(matrices)), *(line for document in random for line in random_lines(document))]
            write(PAGE, "\n".join(lines), *marks)
    return 0 if all(document["met"] for document in documents) else 1


def run_chaos(recipe: str, *options: str) -> dict[str, Any]:
    """Return the output of `headway chaos` on a recipe."""
    command = [sys.executable, "-m", "headway.cli.main", "chaos", f"recipes/{recipe}.toml", *options, "--json"]
    document: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE).stdout)
    return document


def merged(matrices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first matrix with its rows replaced by those of later ones."""
    faults = {row["name"]: row for matrix in matrices for row in matrix["faults"]}
    beside = {row["name"]: row for matrix in matrices for row in matrix["beside"]}
    return {**matrices[0], "faults": [*faults.values()], "beside": [*beside.values()]}


def table(document: dict[str, Any]) -> Iterator[str]:
    """Yield one row per fault."""
    step = 1e3 * document["step_s"]
    yield f"{document['workers']} workers on two cores, steps of {step:.0f} ms; medians of the tries:"
    yield ""
    beside = {row["name"]: row for row in document["beside"]}
    yield f"| fault | noticed | stepping | redone | lost | as expected |{' torchrun: stepping |' if beside else ''}"
    yield f"|---|---:|---:|---:|---:|---:|{'---:|' if beside else ''}"
    for row in document["faults"]:
        cells = [
            row["what"],
            seconds(row["noticed_s"]),
            seconds(row["stepping_s"]),
            f"{row['redone']:g}",
            seconds(row["lost_s"]),
            f"{row['met']} of {len(row['tries'])}",
            *([baseline(beside.get(row["name"]))] if beside else []),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def baseline(row: dict[str, Any] | None) -> str:
    """Return how torchrun recovered from the same fault."""
    if row is None:
        return ""
    often = f"{row['recovered']} of {len(row['tries'])}"
    return f"{seconds(row['stepping_s'])}, {often}" if row["recovered"] else often


def seconds(value: float | None) -> str:
    """Return seconds with about two digits."""
    return "-" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def random_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the result of many random faults in one run."""
    verdict = "the same chain and digest as without faults" if document["met"] else "NOT as expected"
    injected = f"{document['struck']} of {document['faults']} random faults were injected"
    yield f"{injected} into one run of {document['steps']} steps,"
    yield f"in {document['attempts']} attempts: {verdict}."
    yield ""


def write(page: Path, text: str, begin: str, end: str) -> None:
    """Replace the text between two marks of the page."""
    before, rest = page.read_text(encoding="utf-8").split(begin, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
