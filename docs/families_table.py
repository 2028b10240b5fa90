"""Compare every model family with `transformers` and write the table of docs/concepts/models.md.

python docs/families_table.py      some minutes on two cores; exits with 1, writing nothing, if one is not equal
"""

import importlib
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "concepts" / "models.md"
TESTS = ROOT / "tests" / "models"
BEGIN, END = "<!-- made by docs/families_table.py: begin -->", "<!-- made by docs/families_table.py: end -->"
LOGITS, GRADIENTS = 1e-4, 1e-3


@dataclass(frozen=True)
class Row:
    """A small model of one family, and how far Headway is from transformers."""

    name: str
    features: str
    logits: float
    gradients: float

    @property
    def equal(self) -> bool:
        """Whether both differences are within the limits of the tests."""
        return self.logits < LOGITS and self.gradients < GRADIENTS


def main() -> int:
    """Compare all cases, then write the page."""
    rows = list(compared())
    if not rows or not all(row.equal for row in rows):
        return 1
    write(PAGE, "\n".join(table(rows)))
    return 0


def compared() -> Iterator[Row]:
    """Yield the differences of every case of the family tests."""
    sys.path.insert(0, str(TESTS))
    cases = importlib.import_module("family_cases")
    for file in sorted(TESTS.glob("test_family_*.py")):
        for case in importlib.import_module(file.stem).CASES:
            with tempfile.TemporaryDirectory() as folder:
                differences = list(cases.differences(case, Path(folder)))
            logits = max(difference.logits for difference in differences)
            gradients = max(difference.gradients for difference in differences)
            row = Row(case.name, case.features, logits, gradients)
            print(f"{'equal' if row.equal else 'NOT EQUAL':9} {line(row)}", file=sys.stderr, flush=True)
            yield row


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield one row per model."""
    yield f"| model | what it shows | logits (of {short(LOGITS)}) | gradients (of {short(GRADIENTS)}) |"
    yield "|---|---|---:|---:|"
    yield from (line(row) for row in rows)
    yield ""


def line(row: Row) -> str:
    """Return the row of a model."""
    return f"| {row.name} | {row.features} | {row.logits:.1e} | {row.gradients:.1e} |"


def short(limit: float) -> str:
    """Return a limit as 1e-4."""
    return f"{limit:.0e}".replace("e-0", "e-")


def write(page: Path, text: str) -> None:
    """Replace the text between the page's marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
