"""`headway usage`: prints what tenants of the service used in a month, and what it cost."""

import csv
import sys
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import print_json
from headway.cluster.service.connection import connect
from headway.errors import UsageError
from headway.track import runs_root

COLUMNS = ("month", "tenant", "chip", "jobs", "gpu_hours", "cpu_hours", "price")


def usage(
    month: Annotated[
        str | None, typer.Option("--month", metavar="YEAR-MONTH", help="Month in UTC (default: this one).")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option("--price", metavar="CHIP=AMOUNT", help="Price per GPU-hour; repeatable.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print what tenants used in a month: GPU-hours from placement to exit, and CPU-hours.

    A job that is preempted or resized holds what it was given until its node confirms its exit.
    """
    prices = dict(map(_price, price or ()))
    answer = connect(runs_root(runs)).get("/api/v1/usage", month=month)
    rows: list[dict[str, Any]] = [
        {"month": answer["month"], **row, "price": _cost(row, prices)} for row in answer["usage"]
    ]
    if json:
        print_json(rows)
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print(f"{answer['month']}, UTC")
        print(
            f"{'tenant':16}{'chip':12}{'jobs':>7}{'GPU-hours':>14}{'CPU-hours':>14}" + f"{'price':>14}" * bool(prices)
        )
        for row in rows:
            cost = "" if row["price"] is None else f"{row['price']:,.2f}"
            figures = f"{row['jobs']:>7,}{row['gpu_hours']:>14,.2f}{row['cpu_hours']:>14,.2f}"
            print(f"{row['tenant']:16}{row['chip']:12}{figures}" + f"{cost:>14}" * bool(prices))


def _price(text: str) -> tuple[str, float]:
    chip, _, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = -1.0
    if not chip or not 0 <= value < float("inf"):
        raise UsageError(f"--price {text}", hint="CHIP=AMOUNT, such as --price h100=2.50")
    return chip, value


def _cost(row: dict[str, Any], prices: dict[str, float]) -> float | None:
    return row["gpu_hours"] * prices[row["chip"]] if row["chip"] in prices else None
