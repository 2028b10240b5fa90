"""Tells what the table of kernels says: a process of its own, since who asks does not import torch.

python -m headway.kernels.show < {"device", "dtype", "plain", "compiled", "exact"}
"""

import json
import sys

import torch

from headway.kernels.dispatch import make_plain, rows

__all__ = ["main"]


def main() -> None:
    """Read what is asked from standard input, and write the rows to standard output."""
    asked = json.load(sys.stdin)
    make_plain(asked["plain"])
    dtype = getattr(torch, asked["dtype"])
    found = rows(asked["device"], dtype, compiled=asked["compiled"], exact=asked["exact"])
    print(json.dumps([{"operation": row.operation, "case": row.case, **row.choice._asdict()} for row in found]))


if __name__ == "__main__":
    main()
