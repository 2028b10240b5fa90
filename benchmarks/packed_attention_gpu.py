"""Attention of packed documents on one GPU, both passes: the ways there are, beside cuDNN on uniform rows.

    python benchmarks/packed_attention_gpu.py [--heads 64 128] [--rows 4] [--json FILE] [--device cpu]

Documents have 1,024 tokens on average (exponential lengths), laid one after another and cut at rows of 4,096. The bound
is cuDNN's speed per unmasked FLOP on rows of exactly 1,024. Times are the device's, the second-level cache flushed
before each call. Every way is compared with attention of each document alone, in float32.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from headway.kernels.document_attention import document_starts, places_for
from headway.models.attention import attend_all, choose, see

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from run import seconds

LENGTH, MEAN = 4096, 1024
HEADS, KV_HEADS = 32, 8
REPEATS = 15
Both = tuple[Callable[[], object], Callable[[], tuple[Tensor, ...]]]
"""The forward pass alone, and both passes, which return the output and all gradients."""


@dataclass(frozen=True)
class Packed:
    """Tensors of one attention, and the documents they are of."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    documents: Tensor
    lengths: list[int]

    @property
    def flat(self) -> list[Tensor]:
        """Queries, keys, values and gradients, the tokens of all rows one after another."""
        return [x.detach().flatten(0, 1) for x in (self.q, self.k, self.v, self.grad)]


def drawn_lengths(rows: int, length: int, mean: int) -> list[list[int]]:
    """Documents of exponential lengths, cut where a row ends; at least 16 tokens drawn."""
    generator = np.random.default_rng(0)
    filled = list[list[int]]()
    left = 0
    for _ in range(rows):
        row, space = list[int](), length
        while space:
            left = left or max(16, int(generator.exponential(mean)))
            row.append(min(left, space))
            left, space = left - row[-1], space - row[-1]
        filled.append(row)
    return filled


def packed(lengths: list[list[int]], head: int, device: str) -> Packed:
    """Random tensors over rows of documents."""
    rows, length = len(lengths), sum(lengths[0])
    generator = torch.Generator(device).manual_seed(1)
    shapes = [(rows, length, heads, head) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    made = [torch.randn(s, device=device, generator=generator, dtype=torch.float32).bfloat16() for s in shapes]
    q, k, v = (x.requires_grad_() for x in made[:3])
    numbers = [np.repeat(np.arange(len(row)), row) for row in lengths]
    documents = torch.from_numpy(np.stack(numbers).astype(np.int32)).to(device)
    return Packed(q, k, v, made[3], documents, [one for row in lengths for one in row])


def by_autograd(attention: Callable[[], Tensor], case: Packed) -> Both:
    def both() -> tuple[Tensor, ...]:
        out = attention()
        return (out, *torch.autograd.grad(out, (case.q, case.k, case.v), case.grad))

    return attention, both


def uniform(case: Packed) -> Both:
    """cuDNN's causal attention over rows."""

    def attention() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    return by_autograd(attention, case)


def flex(case: Packed) -> Both:
    """What Headway ran before."""
    length = case.q.shape[1]
    kernel = choose(case.q, case.q.shape[-1], True, False, False)
    mask = see(length, {None}, case.documents, case.q.device, kernel)[None]
    return by_autograd(lambda: attend_all(case.q, case.k, case.v, mask), case)


def flash(case: Packed) -> Both:
    """PyTorch's flash attention over ragged rows."""
    q, k, v, grad = case.flat
    starts = document_starts(case.documents, len(case.lengths)).starts_S1
    longest, aten = max(case.lengths), torch.ops.aten
    options = (starts, starts, longest, longest, 0.0, True)

    def forward() -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = aten._flash_attention_forward(q, k, v, *options, False)
        return made

    def both() -> tuple[Tensor, ...]:
        out, sums, *state, _ = forward()
        return (out, *aten._flash_attention_backward(grad, q, k, v, out, sums, *options, *state))

    return forward, both


def cudnn(case: Packed, places: int | None = None, *, deterministic: bool = False) -> Both:
    """What Headway runs: cuDNN over ragged rows."""
    documents = document_starts(case.documents, places or places_for(len(case.lengths)))

    def attention() -> Tensor:
        with repeated(deterministic):
            return attend_all(case.q, case.k, case.v, documents)

    return by_autograd(attention, case)


@contextmanager
def repeated(wanted: bool) -> Iterator[None]:
    """Have PyTorch ask for the same bits every time."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def ways(case: Packed) -> Iterator[tuple[str, Callable[[], Both]]]:
    """Yield all ways on packed documents, the slowest to compile last."""
    yield "cudnn", lambda: cudnn(case)
    yield "cudnn, 256 places", lambda: cudnn(case, 256)
    yield "cudnn, deterministic", lambda: cudnn(case, deterministic=True)
    yield "flash", lambda: flash(case)
    yield "flex", lambda: flex(case)


def reference(case: Packed) -> tuple[Tensor, ...]:
    """Output and gradients of each document alone, in float32."""
    kept: list[list[Tensor]] = [[], [], [], []]
    begin = 0
    for length in case.lengths:
        parts = [x[begin : begin + length].float().transpose(0, 1).unsqueeze(0) for x in case.flat]
        q, k, v = (x.requires_grad_() for x in parts[:3])
        out = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        made = (out, *torch.autograd.grad(out, (q, k, v), parts[3]))
        for parts_of, tensor in zip(kept, made, strict=True):
            parts_of.append(tensor.detach().squeeze(0).transpose(0, 1))
        begin += length
    return tuple(torch.cat(parts_of) for parts_of in kept)


def error_of(made: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """Of outputs and gradients, relative to the norm of each."""
    pairs = zip(made, truth, strict=True)
    return max(float((x.detach().reshape(y.shape).float() - y).norm() / y.norm()) for x, y in pairs)


def timed(made: Both, device: str, flush: Tensor) -> tuple[float, float]:
    """Milliseconds of the forward pass and of both."""
    if device == "cpu":
        return 0.0, 0.0
    times = list[float]()
    for call in made:
        for _ in range(3):
            call()
        times.append(statistics.median(seconds(call, flush) for _ in range(REPEATS)) * 1e3)
    return times[0], times[1]


def measured(
    name: str, build: Callable[[], Both], case: Packed, truth: tuple[Tensor, ...] | None, flush: Tensor
) -> dict[str, object]:
    """One way: times, speed per unmasked FLOP and error; or what it failed with."""
    head = case.q.shape[-1]
    try:
        made = build()
        error = error_of(made[1](), truth) if truth else 0.0
        forward_ms, both_ms = timed(made, case.q.device.type, flush)
    except Exception as failure:  # the next way is measured anyhow
        return {"way": name, "head": head, "failed": f"{type(failure).__name__}: {failure}"[:300]}
    flops = 7 * sum(length**2 for length in case.lengths) * HEADS * head
    speed = flops / both_ms / 1e9 if both_ms else 0.0
    return {"way": name, "head": head, "forward_ms": forward_ms, "both_ms": both_ms, "tflops": speed, "error": error}


def line(row: dict[str, object], bound: float) -> str:
    """One row for people."""
    name = f"{row['head']:>4} {row['way']:<24}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    share = float(row["tflops"]) / bound if bound else 0.0  # type: ignore[arg-type]
    text = f"{name}{row['forward_ms']:8.3f} ms{row['both_ms']:8.3f} ms{row['tflops']:7.1f} TFLOP/s"
    return f"{text}  x{share:.3f} of the bound, error {row['error']:.4f}"


def main() -> None:
    """Measure all ways for each head size; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    flush = torch.empty(2**26 if options.device == "cuda" else 1, device=options.device)
    rows = list[dict[str, object]]()
    mean = options.length * MEAN // LENGTH
    for head in options.heads:
        even = packed([[mean]] * (options.rows * LENGTH // MEAN), head, options.device)
        rows.append(measured("bound: rows of 1,024", lambda even=even: uniform(even), even, None, flush))
        bound = float(rows[-1].get("tflops", 0.0))  # type: ignore[arg-type]
        print(line(rows[-1], bound), flush=True)
        case = packed(drawn_lengths(options.rows, options.length, mean), head, options.device)
        print(f"     {len(case.lengths)} documents, {min(case.lengths)} to {max(case.lengths)} tokens", flush=True)
        truth = reference(case)
        for name, build in ways(case):
            rows.append(measured(name, build, case, truth, flush))
            print(line(rows[-1], bound), flush=True)
            if options.json:
                about = {"device": options.device, "torch": torch.__version__, "documents": case.lengths}
                options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
