"""Prints the dispatch table: a separate process, since `headway kernels` does not import torch.

python -m headway.kernels.show < {"device", "dtype", "plain", "compiled", "exact"}
"""

import json
import sys

import torch

from headway.kernels import paged_attention
from headway.kernels.dispatch import make_plain, rows


def main() -> None:
    """Read a request from stdin, and write the rows to stdout."""
    asked = json.load(sys.stdin)
    make_plain(asked["plain"])
    dtype = getattr(torch, asked["dtype"])
    table = rows(asked["device"], dtype, compiled=asked["compiled"], exact=asked["exact"])
    table += paged_attention.rows(asked["device"])
    print(json.dumps([{"operation": row.operation, "case": row.case, **row.choice._asdict()} for row in table]))


if __name__ == "__main__":
    main()
