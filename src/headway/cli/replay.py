"""`headway replay`: every decision that was recorded, made again."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json

__all__ = ["replay"]


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What headway simulate --record wrote.")],
    json: Json = False,
) -> None:
    """Decide again what was recorded, and prove every decision equal; exit 1 where one is not."""
    from headway.cli.text import print_json
    from headway.cluster.scheduler.decision_log import policies_in, record_of
    from headway.cluster.scheduler.decision_log import replay as decided_again

    equal, told = True, dict[str, dict[str, object]]()
    for policy in policies_in(folder):
        cycles, difference = 0, None
        for difference in decided_again(record_of(folder, policy)):
            cycles += difference is None
        equal &= difference is None
        told[policy] = {"cycles": cycles, "equal": difference is None, "difference": difference}
        if json:
            continue
        if difference is None:
            print(f"{policy}: {cycles:,} cycles, every decision equal")
        else:
            print(f"{policy}: {cycles:,} cycles equal, and the one at {difference.at_s:.0f} s is not")
            print(f"  recorded: {_words(difference.recorded)}")
            print(f"  today:    {_words(difference.today)}")
    if json:
        print_json({"equal": equal, "policies": told})
    if not equal:
        raise typer.Exit(1)


def _words(decision: tuple[object, ...]) -> str:
    if not decision:
        return "nothing"
    kind, job, place, at_s, code, numbers = decision
    assert isinstance(numbers, list)
    why = ", ".join(f"{name} {number}" for name, number in numbers)
    when = f" at {at_s} s" if kind == "reserve" else ""
    return f"{kind} {job}{when} on (pool, nodes, GPUs) {place}: {code} ({why})"
