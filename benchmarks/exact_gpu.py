"""Exact mode on a GPU: does an engine in bfloat16 have the trainer's bits, where not, and what does it cost?

    python benchmarks/exact_gpu.py [--out FILE] [--only components engine gradients cost] [--families llama qwen3]

    components    each kernel of the trainer beside that of the engine, alone and in any batch
    engine        small models with random weights: thousands of sampled tokens, from engines with chunks, preemptions,
                  prefix-cache hits, with and without CUDA graphs, beside the trainer's pass over packed documents
    gradients     those of exact mode beside those of plain float32
    cost          a training step over log-probabilities of Qwen3-0.6B's shape, exact and plain, in turns

A control with another tile of keys must differ. The exit status is 1 if anything else does.
"""

import argparse
import copy
import itertools
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.kernels import exact_attention, exact_products, online_softmax, sequential_linear
from headway.kernels.dispatch import make_plain
from headway.kernels.gated import swiglu
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.paged_triton import causal_attention, exact_tiling, triton_attention
from headway.kernels.rms_norm import forward_early, rms_norm
from headway.kernels.rope import rope_one
from headway.kernels.rotary_store import HeadShape, rotate_and_store
from headway.kernels.sampling import draw, label_logprobs
from headway.models import Decoder, empty_decoder
from headway.models.exact import make_exact
from headway.models.rotary import rotary_table
from headway.recipe.families import class_of

CUDA, BF16 = "cuda", torch.bfloat16
SMALL = {"vocab_size": 32000, "layers": 5, "dim": 1024, "heads": 16, "kv_heads": 4, "hidden": 3072, "init_std": 0.05}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"family": "llama", "qk_norm": True, "heads": 8, "kv_heads": 2, "head_dim": 128},
    "mixtral": {"family": "mixtral", "experts": 8, "top_k": 2, "hidden": 1024},
    "qwen3_moe": {
        "family": "qwen3_moe", "experts": 16, "top_k": 4, "expert_hidden": 512, "heads": 8, "kv_heads": 2,
        "head_dim": 128,
    },
}  # fmt: skip
"""Shapes of matrices agree, so that kernels are compiled once."""
ENGINES: dict[str, dict[str, Any]] = {
    "graphs, chunks, preemptions": {"max_sequences": 24, "max_batch_tokens": 150, "cache_tokens": 2400},
    "no graphs, no sharing": {"max_sequences": 48, "shares_prefixes": False, "graphs": False, "overlaps": False},
    "pages of 64, chunks": {"max_sequences": 33, "max_batch_tokens": 500, "block_size": 64, "graphs": False},
}
QWEN3_06B = {
    "family": "llama", "vocab_size": 151936, "layers": 28, "dim": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "hidden": 3072, "qk_norm": True, "tie_embeddings": True,
}  # fmt: skip
VOCABULARY = 31900
STARTED = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"components": components, "engine": engines, "gradients": gradients, "cost": cost}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["llama", "qwen3", "mixtral"])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--warm", action="store_true", help="only compile the kernels of cost, beside other processes")
    parser.add_argument("--compiled", action="store_true", help="time plain blocks that are compiled, too (a minute)")
    asked = parser.parse_args()
    out = asked.out or Path(os.environ.get("OUT", ".")) / "exact_gpu.json"
    result: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    wrong = []
    for name in asked.only:
        say(f"-- {name}")
        rows = result.setdefault(name, {})
        try:
            for label, value, fine in parts[name](asked):
                rows[label] = value
                say(f"{'ok  ' if fine else 'BAD '} {label:<62} {value}")
                if not fine:
                    wrong.append(f"{name}: {label}")
        except Exception:
            traceback.print_exc(file=sys.stdout)
            wrong.append(f"{name}: an error")
        result["seconds"] = round(time.monotonic() - STARTED, 1)
        out.write_text(json.dumps(result | {"wrong": wrong}, indent=1))
    say(f"{result['seconds']} s; " + (f"{len(wrong)} wrong: {'; '.join(wrong)}" if wrong else "all equal"))
    sys.exit(1 if wrong else 0)


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} {text}", flush=True)


class Row(NamedTuple):
    """A line of the table."""

    label: str
    value: Any
    fine: bool


def compared(label: str, a: Tensor, b: Tensor, *, differs: bool = False) -> Row:
    """Whether two tensors have the same bits, and what share of elements has not."""
    share = (a != b).float().mean().item()
    most = (a.double() - b.double()).abs().max().item()
    value = "equal" if share == 0 else f"{share:.2%} of elements differ, by up to {most:.3g}"
    return Row(label, value, (share > 0) == differs)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


# -- components


def components(_: argparse.Namespace) -> Iterator[Row]:
    for part in (products, experts, norms, rotations, activations, attentions, logprobs):
        try:
            yield from part()
        except Exception:  # the others still say something
            traceback.print_exc(file=sys.stdout)
            yield Row(part.__name__, "an error", False)


def products() -> Iterator[Row]:
    shapes = [(1024, 1024, True), (256, 1024, True), (3072, 1024, False), (1024, 3072, False), (8, 1024, False)]
    for outputs, inputs, biased in shapes:
        x, weight = noise(3 * 1024 + 37, inputs), noise(outputs, inputs, seed=1) * inputs**-0.5
        bias = noise(outputs, seed=2) if biased else None
        yield from products_of(f"product {inputs} x {outputs}{' + bias' if biased else ''}", x, weight, bias, BF16)
    x, weight = noise(2048 + 37, 1024), noise(32000, 1024, seed=1) * 0.05
    yield from products_of("head 1024 x 32000 -> float32", x, weight, None, torch.float32)
    for name, agrees in exact_products.verdicts():
        yield Row(f"cuBLAS {name}", "agrees" if agrees else "differs: sequential kernel", True)


def products_of(label: str, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Iterator[Row]:
    """The trainer's product of all rows beside those of some, and of the engine's kernel."""
    whole = exact_products.product(x, weight, bias, dtype)
    worst = []
    for rows in (1, 2, 7, 16, 17, 33, 64, 100, 200, 256, 300, 1000, 1024, 1500):
        first = 5 if rows < 1500 else 0
        got = exact_products.product(x[first : first + rows], weight, bias, dtype)
        direct = sequential_linear.linear(
            x[first : first + rows], (weight,), None if bias is None else (bias,), dtype=dtype
        )
        for other in (got, direct):
            if not torch.equal(other, whole[first : first + rows]):
                worst.append(rows)
    yield Row(f"{label}, 14 numbers of rows", "equal" if not worst else f"differs at {worst}", not worst)


def experts() -> Iterator[Row]:
    for count, outputs, inputs in ((8, 1024, 1024), (16, 512, 1024), (16, 1024, 512)):
        agrees = exact_products.grouped_agrees(count, outputs, inputs, torch.device(CUDA, 0))
        yield Row(f"grouped product {count} x {inputs} x {outputs}", "agrees" if agrees else "differs", agrees)


def norms() -> Iterator[Row]:
    for width, heads in ((1024, 1), (4096, 1), (128, 8), (64, 16)):
        x, weight = noise(3000 * heads, width), noise(width, seed=1).float() + 1
        whole = rms_norm(x, weight, 1e-5)
        for rows in (1, 3, 50):
            some = x[7 * heads : (7 + rows) * heads]
            yield compared(
                f"norm of {width}, {rows} of 3,000", rms_norm(some, weight, 1e-5), whole[7 * heads :][: len(some)]
            )
        few = forward_early(x[: 5 * heads], weight.to(BF16), 1e-5)
        yield compared(f"norm of {width}, engine's launch", few, whole[: len(few)])


def rotations() -> Iterator[Row]:
    for size, queries, keys in ((64, 16, 4), (128, 8, 2)):
        for normed in (False, True):
            tokens, shape = 500, HeadShape(queries, keys, size)
            q, k, v = (noise(tokens, n * size, seed=n) for n in (queries, keys, keys))
            weights = noise(size, seed=3) + 1, noise(size, seed=4) + 1
            positions = torch.randint(0, 4000, (tokens,), device=CUDA)
            table = rotary_table(torch.arange(4096, device=CUDA), size, 1e4)
            of_tokens = rotary_table(positions, size, 1e4)
            pages, slots = (
                torch.zeros(2, 40, 16, keys, size, device=CUDA, dtype=BF16),
                torch.randperm(640, device=CUDA)[:tokens],
            )
            got, _, _ = rotate_and_store(
                q, k, v, shape, table, positions, slots, pages[0], pages[1], weights if normed else None, 1e-5
            )
            wanted = []
            for x, heads, weight in ((q, queries, weights[0]), (k, keys, weights[1])):
                x = x.view(1, tokens, heads, size)
                x = rms_norm(x, weight, 1e-5) if normed else x
                wanted.append(rope_one(x, of_tokens)[0])
            name = f"rotation of {size}{', norms' if normed else ''}"
            yield compared(f"{name}: queries", got, wanted[0])
            yield compared(f"{name}: keys in pages", pages[0].flatten(0, 1)[slots], wanted[1])
            x = q.view(1, tokens, queries, size)
            yield compared(
                f"{name}: one token", rope_one(x[:, 9:10], of_tokens[:, 9:10]), rope_one(x, of_tokens)[:, 9:10]
            )


def activations() -> Iterator[Row]:
    x = noise(1500, 1024)
    gate, up = (noise(3072, 1024, seed=seed) * 0.05 for seed in (1, 2))
    both = [exact_products.product(x, w) for w in (gate, up)]
    whole = swiglu(*both)
    yield compared("gated, 3 of 1,500 rows", swiglu(both[0][5:8], both[1][5:8]), whole[5:8])
    for rows in (1, 20, 60, 250):
        yield compared(
            f"gated, engine's kernel, {rows} rows", sequential_linear.gated_linear(x[:rows], gate, up), whole[:rows]
        )
    stream, y = noise(20, 1024, seed=5), noise(20, 3072, seed=6)
    down = noise(1024, 3072, seed=7) * 0.05
    wanted = stream + exact_products.product(y, down)
    yield compared("product added to the stream", sequential_linear.linear_into(stream.clone(), y, down), wanted)


LENGTHS = [700, 1, 63, 64, 65, 300, 129, 726]


def attentions() -> Iterator[Row]:
    for size, heads, keys in ((64, 16, 4), (128, 8, 2), (128, 16, 8)):
        for window in (None, 100):
            yield from attentions_of(size, heads, keys, window)


def attentions_of(size: int, heads: int, key_heads: int, window: int | None) -> Iterator[Row]:
    tokens, label = (
        sum(LENGTHS),
        f"attention {heads}/{key_heads} x {size}{'' if window is None else f', window {window}'}",
    )
    q, k, v = (noise(tokens, n, size, seed=i) for i, n in enumerate((heads, key_heads, key_heads)))
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    queries, device = exact_tiling(heads // key_heads).queries, torch.device(CUDA, 0)
    plan, _ = exact_attention.plan_documents(numbers[None], 1, tokens, queries, device)
    whole, sums = causal_attention(q, k, v, plan.starts_S1, plan.programs, size**-0.5, window)
    starts = plan.starts_S1.tolist()
    order = random.Random(0).sample(range(1000), 400)
    pages = torch.zeros(2, 1000, 16, key_heads, size, device=CUDA, dtype=BF16)
    tables = []
    for number, length in enumerate(LENGTHS):
        tables.append([order.pop() for _ in range(-(-length // 16))])
        place = torch.tensor([tables[-1][p // 16] * 16 + p % 16 for p in range(length)], device=CUDA)
        for x, kept in ((k, pages[0]), (v, pages[1])):
            kept.flatten(0, 1)[place] = x[starts[number] : starts[number] + length]

    def paged(counts: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Attention of the last tokens of beginnings of the documents, and the trainer's."""
        rows = torch.cat([torch.arange(s + n - c, s + n) for s, n, c in zip(starts, lengths, counts, strict=False)])
        batch = batch_of(counts, lengths, tables)
        return triton_attention(q[rows], *pages, batch, size**-0.5, window, exact=True), whole[rows]

    ones = [1] * len(LENGTHS)
    yield compared(f"{label}: decode", *paged(ones, LENGTHS))
    yield compared(f"{label}: decode, shorter", *paged(ones, [max(1, n // 2) for n in LENGTHS]))
    yield compared(f"{label}: chunks", *paged([min(n, 1 + 37 * i) for i, n in enumerate(LENGTHS)], LENGTHS))
    yield compared(f"{label}: small chunks", *paged([min(n, 5) for n in LENGTHS], LENGTHS))
    yield compared(f"{label}: whole prompts", *paged(LENGTHS, LENGTHS))
    own = exact_tiling(heads // key_heads)
    other, _ = causal_attention(q, k, v, plan.starts_S1, plan.programs, size**-0.5, window, own._replace(keys=32))
    yield compared(f"{label}: control with tiles of 32 keys differs", other, whole, differs=True)
    if window is None:
        true = sums_of(q[:700], k[:700], size)
        most = (sums[:, :700].double() - true).abs().max().item()
        yield Row(f"{label}: log-sum-exp, most off", f"{most:.2g}", most < 1e-2)


def batch_of(counts: list[int], lengths: list[int], tables: list[list[int]]) -> PagedBatch:
    starts, wide = [0, *itertools.accumulate(counts)], max(map(len, tables))
    integers = {"dtype": torch.int32, "device": CUDA}
    return PagedBatch(
        starts=tuple(starts),
        lengths=tuple(lengths),
        starts_S1=torch.tensor(starts, **integers),
        lengths_S=torch.tensor(lengths, **integers),
        tables_SP=torch.tensor([t + [0] * (wide - len(t)) for t in tables], **integers),
        slots_T=torch.zeros(sum(counts), dtype=torch.int64, device=CUDA),
    )


def sums_of(q: Tensor, k: Tensor, size: int) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("tnh,snh->nts", q.double(), k.double()) * size**-0.5
    hidden = torch.ones(scores.shape[1:], device=CUDA, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).logsumexp(dim=-1)


def logprobs() -> Iterator[Row]:
    for vocabulary in (32000, 151936):
        logits = noise(70, vocabulary, dtype=torch.float32) * 3
        for temperature in (1.0, 0.8):
            temperatures = torch.tensor([[temperature, temperature]] * 70, device=CUDA)
            tokens, sampled = torch.zeros(70, dtype=torch.int64, device=CUDA), torch.zeros(70, device=CUDA)
            seeds = torch.arange(70, device=CUDA)
            draw(logits, vocabulary - 5, vocabulary, temperatures, seeds, seeds.int(), tokens, sampled)
            label = f"log-probabilities of {vocabulary}, temperature {temperature}"
            yield compared(f"{label}: as drawn", label_logprobs(logits, tokens, temperature), sampled)
            yield compared(f"{label}: one row", label_logprobs(logits[9:10], tokens[9:10], temperature), sampled[9:10])
            true = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            most = (true - sampled).abs().max().item()
            yield Row(f"{label}: most off", f"{most:.2g}", most < 1e-4)


# -- engines beside the trainer


def decoder_of(values: dict[str, Any], dtype: torch.dtype = BF16) -> Decoder:
    decoder = empty_decoder(class_of(values)(**values), CUDA)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1, 0.3)
            else:
                parameter.normal_(0, 0.3 if parameter.dim() == 1 else values.get("init_std", 0.02))
    return decoder.to(dtype).eval()


class Answer(NamedTuple):
    """What the engine sampled after a prompt."""

    tokens: list[int]
    logprobs: Tensor
    """Of the last tokens."""


def requests(count: int, temperature: float, rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some with equal beginnings, and parameters."""
    shared = [rng.randrange(VOCABULARY) for _ in range(300)]
    begins = [shared[: rng.randrange(1, 300)] if rng.random() < 0.5 else [] for _ in range(count)]
    prompts = [begin + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 150))] for begin in begins]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(30, 100), temperature=temperature, seed=i, logprobs=0, ignore_eos=True,
            logprobs_at_temperature=True, top_p=rng.choice([1, 0.9]),
        )
        for i in range(count)
    ]  # fmt: skip
    return prompts, params


def sampled_by(decoder: Decoder, asked: Any, **options: Any) -> tuple[list[Answer], Any]:
    loaded = LoadedModel("small", decoder, torch.device(CUDA, 0), VOCABULARY, 1024)
    llm = LLM(loaded, options=EngineOptions(**{"exact": True, "cache_tokens": 60_000, **options}))
    answers = [
        Answer(result.prompt_ids + o.token_ids, torch.tensor([token.logprob for token in o.logprobs]))
        for result in llm.generate(*asked)
        for o in result.outputs
    ]
    return answers, llm.engine.engine.counts


@torch.no_grad()
def trained(
    score: Callable[..., Tensor], answers: list[Answer], length: int, rows: int, temperature: float, rng: random.Random
) -> list[Tensor]:
    """The trainer's log-probabilities of what was sampled, with documents packed into rows in random order."""
    packed = list[list[int]]()
    for number in rng.sample(range(len(answers)), len(answers)):
        needed = len(answers[number].tokens) - 1
        if not packed or sum(len(answers[i].tokens) - 1 for i in packed[-1]) + needed > length:
            packed.append([])
        packed[-1].append(number)
    shape = len(packed), length
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    documents, places = torch.zeros(shape, dtype=torch.int32), {}
    for row, numbers in enumerate(packed):
        begin = 0
        for document, number in enumerate(numbers):
            ids = torch.tensor(answers[number].tokens)
            here = slice(begin, begin + len(ids) - 1)
            tokens[row, here], labels[row, here], documents[row, here] = ids[:-1], ids[1:], document
            begin, places[number] = begin + len(ids) - 1, (row, begin + len(ids) - 1)
        documents[row, begin:] = len(numbers)  # padding
    inputs = [x.to(CUDA) for x in (tokens, labels, documents)]
    logprobs = torch.cat(
        [score(*(x[i : i + rows] for x in inputs), temperature=temperature) for i in range(0, len(packed), rows)]
    ).cpu()
    ends = [places[number] for number in range(len(answers))]
    return [logprobs[row, end - len(a.logprobs) : end] for (row, end), a in zip(ends, answers, strict=True)]


def joined(label: str, answers: list[Answer], others: list[Tensor], note: str = "", *, differs: bool = False) -> Row:
    row = compared(label, torch.cat([a.logprobs for a in answers]), torch.cat(others), differs=differs)
    count = sum(len(a.logprobs) for a in answers)
    return Row(row.label, f"{row.value}, {count:,} tokens{note}", row.fine)


PACKINGS = ((1024, 2), (700, 1), (2000, 5))
"""Length of rows, and rows of a microbatch."""


def engines(asked: argparse.Namespace) -> Iterator[Row]:
    for name in asked.families:
        values = {**SMALL, **FAMILIES[name]}
        decoder = decoder_of(values)
        before: dict[float, list[Answer]] = {}
        for number, (how, options) in enumerate(ENGINES.items()):
            temperature, rng = (1.0, 0.8, 1.0)[number], random.Random(number)
            wanted = requests(48, temperature, random.Random(7))
            answers, counts = sampled_by(decoder, wanted, **options)
            note = f" ({counts.preemptions} preemptions, {counts.shared_tokens:,} of {counts.prompt_tokens:,} cached)"
            for length, rows in PACKINGS:
                others = trained(decoder.logprobs, answers, length, rows, temperature, rng)
                yield joined(f"{name}, {how}, {rows} x {length}", answers, others, note)
            if temperature in before:
                same = [a.tokens for a in before[temperature]] == [a.tokens for a in answers]
                yield Row(f"{name}, {how}: the tokens of the first engine", "equal" if same else "differ", same)
            before[temperature] = answers
        both = trained(
            lambda *of, d=decoder, **to: d.logprobs_and_entropy(*of, **to)[..., 0], answers, 1024, 2, 1.0,
            random.Random(3),
        )  # fmt: skip
        yield joined(f"{name}, beside entropies", answers, both)
        graded = trained(with_gradients(decoder), answers, 1024, 2, 1.0, random.Random(3))
        yield joined(f"{name}, in a pass with gradients", answers, graded)
        if name == asked.families[0]:
            yield from controls(values)
        yield from mixed_precision(name, values)


def with_gradients(decoder: Decoder) -> Callable[..., Tensor]:
    def score(*of: Tensor, **to: Any) -> Tensor:
        with torch.enable_grad():
            logprobs = decoder.logprobs(*of, **to)
            logprobs.sum().backward()
        decoder.zero_grad(set_to_none=True)
        return logprobs.detach()

    return score


def controls(values: dict[str, Any]) -> Iterator[Row]:
    """What must differ: another tile of keys on one side, and no exact mode."""
    asked = requests(24, 1.0, random.Random(7))
    exact, plain = decoder_of(values), decoder_of(values)
    make_exact(exact, torch.device(CUDA, 0))
    keys = online_softmax.EXACT_KEYS
    try:
        online_softmax.EXACT_KEYS = 32
        others, _ = sampled_by(decoder_of(values), asked, graphs=False, max_sequences=24)
    finally:
        online_softmax.EXACT_KEYS = keys
    own = trained(exact.logprobs, others, 1024, 2, 1.0, random.Random(3))
    yield joined("control: tiles of 32 keys in the engine differ", others, own, differs=True)
    others, _ = sampled_by(plain, asked, exact=False, counts_padding=True, max_sequences=24, graphs=False)
    own = trained(plain.logprobs, others, 1024, 2, 1.0, random.Random(3))
    yield joined("control: without exact mode they differ", others, own, differs=True)


def mixed_precision(name: str, values: dict[str, Any]) -> Iterator[Row]:
    """A trainer with float32 weights, which autocast rounds, beside an engine with rounded ones."""
    master = decoder_of(values, torch.float32)
    with torch.no_grad():
        for parameter in master.parameters():
            parameter.mul_(1 + 1e-3 * torch.rand_like(parameter))
    rounded = copy.deepcopy(master).to(BF16)
    make_exact(master, torch.device(CUDA, 0), BF16)
    answers, _ = sampled_by(rounded, requests(24, 1.0, random.Random(9)), max_sequences=24, graphs=False)

    def score(*of: Tensor, **to: Any) -> Tensor:
        with torch.autocast(CUDA, dtype=BF16):
            return with_gradients(master)(*of, **to)

    yield joined(
        f"{name}, float32 weights under autocast", answers, trained(score, answers, 1024, 2, 1.0, random.Random(3))
    )


# -- gradients


def gradients(asked: argparse.Namespace) -> Iterator[Row]:
    """Each way's distance from float32: exact mode's must not be larger than plain bfloat16's by much."""
    make_plain(["attention"])  # a mask: flex attention would be compiled for each model
    generator = torch.Generator().manual_seed(0)
    for name in asked.families:
        values = {
            **SMALL,
            **FAMILIES[name],
            "layers": 3,
            **({"window": 100, "family": "mistral"} if name == "llama" else {}),
        }
        values.pop("qkv_bias", None)
        tokens, labels = (torch.randint(0, VOCABULARY, (2, 512), generator=generator).to(CUDA) for _ in range(2))
        documents = (torch.rand(2, 512, generator=generator) < 0.01).int().cumsum(1).int().to(CUDA)
        found = {}
        for way in ("float32", "plain", "exact"):
            decoder = decoder_of(values, torch.float32)
            decoder = decoder.to(BF16) if way != "float32" else decoder.to(BF16).float()
            if way == "exact":
                make_exact(decoder, torch.device(CUDA, 0))
            decoder.logprobs_and_entropy(tokens, labels, documents).sum().backward()
            found[way] = {n: p.grad.float() for n, p in decoder.named_parameters() if p.grad is not None}
        size = sum(g.double().square().sum() for g in found["float32"].values()).sqrt().item()

        def apart(way: str, found: Any = found, size: float = size) -> float:
            pairs = ((found[way][n] - g).double().square().sum() for n, g in found["float32"].items())
            return sum(pairs).sqrt().item() / size

        plain, exact = apart("plain"), apart("exact")
        yield Row(
            f"{name}: gradients off float32's", f"exact {exact:.3%}, plain {plain:.3%}", exact < 1.5 * plain + 5e-3
        )
    make_plain(())


# -- cost


def cost(asked: argparse.Namespace) -> Iterator[Row]:
    decoders = {"plain": decoder_of(QWEN3_06B), "exact": decoder_of(QWEN3_06B)}
    make_exact(decoders["exact"], torch.device(CUDA, 0))
    if asked.compiled:
        decoders["compiled"] = decoder_of(QWEN3_06B)
        for block in decoders["compiled"].layers:
            block.forward = torch.compile(block.forward)
    tokens, labels = (torch.randint(0, 151936, (8, 2048), device=CUDA) for _ in range(2))
    documents = (torch.arange(2048, device=CUDA) >= 900).int().expand(8, -1).contiguous()

    def step(decoder: Decoder, within: Tensor | None, entropy: bool) -> None:
        score = decoder.logprobs_and_entropy if entropy else decoder.logprobs
        score(tokens, labels, within).sum().backward()
        decoder.zero_grad(set_to_none=True)

    def forward(decoder: Decoder, within: Tensor | None, _: bool) -> None:
        with torch.no_grad():
            decoder.logprobs(tokens, labels, within)

    works = {
        "training step": (step, None, False),
        "training step, entropies": (step, None, True),
        "forward pass": (forward, None, False),
        "training step, 2 documents per row": (step, documents, False),
    }
    if asked.warm:
        for decoder in decoders.values():
            step(decoder, None, True)
        return
    for label, (work, within, entropy) in works.items():
        if within is not None:
            yield from parts_of_cost()
        times: dict[str, list[float]] = {name: [] for name in decoders}
        for turn in range(5):
            for name, decoder in decoders.items():
                if name == "compiled" and within is not None:
                    continue
                taken = timed(lambda d=decoder, w=work, x=within, e=entropy: w(d, x, e))
                if turn > 1:
                    times[name].append(taken)
        medians = {name: statistics.median(values) for name, values in times.items() if values}
        told = ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items())
        yield Row(f"Qwen3-0.6B shape, 8 x 2,048: {label}", f"{told}: {medians['exact'] / medians['plain']:.3f}", True)


def parts_of_cost() -> Iterator[Row]:
    """Where the difference comes from."""
    for outputs, inputs in ((2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072)):
        x, weight = noise(16384, inputs), noise(outputs, inputs, seed=1) * 0.05
        ways = {
            "exact": lambda x=x, w=weight: exact_products.product(x, w),
            "cuBLAS": lambda x=x, w=weight: x @ w.T,
            "sequential": lambda x=x, w=weight: exact_products.sequential(x, w, None, BF16),
        }
        yield timed_ways(f"16,384 x {inputs} x {outputs}", ways)
    for name, agrees in exact_products.verdicts():
        if name.startswith(("16384", "1024 x 1024 x 151936")):
            yield Row(f"cuBLAS {name}", "agrees" if agrees else "differs: sequential kernel", True)
    q, k, v = (noise(8, 2048, n, 128, seed=n).requires_grad_() for n in (16, 8, 8))
    plan, _ = exact_attention.plan_documents(None, 8, 2048, exact_tiling(2).queries, torch.device(CUDA, 0))
    from headway.models.attention import attend_all

    def exact() -> Tensor:
        return exact_attention.attention(q, k, v, plan, attend_all)

    def plain() -> Tensor:
        return attend_all(q, k, v, None)

    dy = noise(8, 2048, 16, 128, seed=9)
    yield timed_ways("attention, forward", {"exact": exact, "plain": plain})
    both = {"exact": lambda: exact().backward(dy), "plain": lambda: plain().backward(dy)}
    yield timed_ways("attention, forward and backward", both)


def timed_ways(label: str, ways: dict[str, Callable[[], Any]]) -> Row:
    times = {name: [timed(way, 5) for _ in range(5)][1:] for name, way in ways.items()}
    return Row(label, ", ".join(f"{name} {statistics.median(t):.3f} ms" for name, t in times.items()), True)


def timed(work: Callable[[], Any], count: int = 1) -> float:
    """Return milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


if __name__ == "__main__":
    main()
