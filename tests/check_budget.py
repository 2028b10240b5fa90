"""Compare the CPU-seconds of the last `make test` with tests/budget.toml; `make lint` ends with it.

python tests/check_budget.py .test-results/test.json
"""

import json
import sys
import tomllib
from pathlib import Path

BUDGET = Path(__file__).with_name("budget.toml")
NOISE = 1.4
"""The same tests have used up to a third more on a busy machine than on an idle one."""


def over_budget(used_s: dict[str, float], budget_s: dict[str, float], speed: float) -> list[str]:
    """One line per package that used more than it may, in CPU-seconds of the machine that the budgets are for."""
    lines = []
    for package, cpu_s in sorted(used_s.items()):
        scaled_s = cpu_s * speed
        if package not in budget_s:
            lines.append(f"{package}: {scaled_s:.1f} CPU-seconds, and no budget")
        elif scaled_s > NOISE * budget_s[package]:
            lines.append(f"{package}: {scaled_s:.1f} CPU-seconds of {budget_s[package]:g}")
    return lines


def main(record: Path) -> int:
    """The exit status: 1 where a package is over its budget."""
    if not record.exists():
        print("tests/budget.toml: nothing to compare with before a `make test`")
        return 0
    result = json.loads(record.read_text())
    lines = over_budget(result["packages"], tomllib.loads(BUDGET.read_text())["cpu_s"], result["speed"])
    for line in lines:
        print(f"tests/budget.toml: {line}", file=sys.stderr)
    if lines:
        print("hint: make the tests cheaper, mark long ones slow, or raise the budget and say why", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
