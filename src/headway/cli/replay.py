"""`headway replay`: repeats recorded scheduling decisions and compares them."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json
from headway.cli.text import print_json
from headway.cluster.scheduler.decision_log import policies_in, record_of
from headway.cluster.scheduler.decision_log import replay as replay_record


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder written by headway simulate --record.")],
    json: Json = False,
) -> None:
    """Repeat recorded scheduling decisions and compare; exits with 1 if one differs."""
    equal, results = True, dict[str, dict[str, object]]()
    for policy in policies_in(folder):
        cycles, difference = 0, None
        for difference in replay_record(record_of(folder, policy)):
            cycles += difference is None
        equal &= difference is None
        results[policy] = {"cycles": cycles, "equal": difference is None, "difference": difference}
        if json:
            continue
        if difference is None:
            print(f"{policy}: {cycles:,} cycles, every decision equal")
        else:
            print(f"{policy}: {cycles:,} cycles equal; the one at {difference.at_s:.0f} s differs")
            print(f"  recorded: {_describe(difference.recorded)}")
            print(f"  today:    {_describe(difference.today)}")
    if json:
        print_json({"equal": equal, "policies": results})
    if not equal:
        raise typer.Exit(1)


def _describe(decision: tuple[object, ...]) -> str:
    if not decision:
        return "nothing"
    kind, job, place, at_s, code, numbers = decision
    assert isinstance(numbers, list)
    why = ", ".join(f"{name} {number}" for name, number in numbers)
    when = f" at {at_s} s" if kind == "reserve" else ""
    return f"{kind} {job}{when} on (pool, nodes, GPUs) {place}: {code} ({why})"
