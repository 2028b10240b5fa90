"""Attention with tiles shared out evenly, against sums over a float64 softmax, in Triton's interpreter and on a GPU."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from test_paged_attention import draw, exact

from headway.kernels import online_softmax
from headway.kernels.even_attention import ENTRY, count_runs, even_attention, share_out, takes_evenly
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.paged_triton import triton_attention

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(online_softmax, "EXACT_KEYS", 16)
    monkeypatch.setattr(online_softmax, "EXACT_SPAN", 32)
    return


def lengths(count: int, longest: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(1, rng.randint(1, longest)) for _ in range(count)]


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("count", "runs", "page", "heads"),
    [
        pytest.param(5, 4, 16, (2, 1), id="sequences end in other runs than they begin in"),
        pytest.param(1, 8, 32, (6, 2), id="one sequence in many runs"),
        pytest.param(2, 20, 16, (2, 1), id="more runs than tiles"),
        pytest.param(3, 1, 16, (2, 2), id="one run"),
    ],
)
def test_each_query_attends_to_all_keys_of_its_sequence_and_no_cut_changes_the_bits_of_exact_mode(
    count: int, runs: int, page: int, heads: tuple[int, int]
) -> None:
    case = draw(lengths(count, 90, count), heads, 16, page, torch.float32)
    q, keys, values, batch, whole = case
    for pages in (keys, values):  # what is beyond a sequence's end is never read into a sum
        for row, length in zip(batch.tables_SP.tolist(), batch.lengths, strict=True):
            if length % page:
                pages[row[length // page], length % page :] = float("nan")
    wanted = exact(case, 0.25, None, None, None)
    plain = even_attention(q, keys, values, batch.tile_list(*keys.shape[:2], runs), 0.25)
    assert (plain.double() - wanted).abs().max() < 1e-5
    tiles = share_out(batch.lengths_S, batch.tables_SP, *keys.shape[:2], runs, exact=True)
    out = even_attention(q, keys, values, tiles, 0.25)
    assert (out.double() - wanted).abs().max() < 1e-5
    assert torch.equal(out, triton_attention(q, keys, values, batch, 0.25, exact=True))
    assert len(whole) == count


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(8))
def test_runs_have_every_tile_once_begin_with_a_span_and_differ_by_no_more_than_one(seed: int) -> None:
    rng = random.Random(seed)
    longest, runs = rng.choice([(40, 3), (400, 7), (1500, 12)]), rng.randint(1, 40)
    batch = lists_of([rng.randint(1, longest[0]) for _ in range(rng.randint(1, longest[1]))], page=16)
    tiles = share_out(batch.lengths_S, batch.tables_SP, 10_000, 16, runs, exact=True)
    firsts, cuts = tiles.firsts_S1.tolist(), tiles.cuts_R1.tolist()
    spans = {tile for first, end in itertools.pairwise(firsts) for tile in [*range(first, end, 2), end]}
    assert (cuts[0], cuts[-1]) == (0, firsts[-1])
    assert cuts == sorted(cuts)
    assert set(cuts) <= spans
    for low, high in itertools.pairwise(cuts):
        assert high - low <= firsts[-1] / runs + 1 + 2
        # what a run keeps of a sequence that began before it has room
        sequence_end = min(end for end in firsts if end > low or end == firsts[-1])
        assert -(-(min(high, sequence_end) - low) // 2) <= tiles.room


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_pages_that_sequences_share_may_be_more_than_there_is_room_for() -> None:
    whole = lists_of([160] * 3, page=16)
    shared = PagedBatch(
        whole.starts, whole.lengths, whole.starts_S1, whole.lengths_S, whole.tables_SP[:1].repeat(3, 1), whole.slots_T
    )
    q, pages = torch.randn(3, 1, 16), torch.randn(2, 10, 16, 1, 16)
    tiles = shared.tile_list(10, 16, 2, exact=True)
    assert set(tiles.cuts_R1.tolist()) <= set(tiles.firsts_S1.tolist())
    assert torch.equal(even_attention(q, *pages, tiles, 0.25), triton_attention(q, *pages, shared, 0.25, exact=True))


def lists_of(counts: list[int], page: int) -> PagedBatch:
    """Decoding sequences of such lengths, whose pages follow each other."""
    widest = max(-(-count // page) for count in counts)
    starts, tables = list(range(len(counts) + 1)), torch.arange(len(counts) * widest).view(-1, widest)
    integers = [torch.tensor(x, dtype=torch.int32) for x in (starts, counts)]
    slots = torch.zeros(len(counts), dtype=torch.int64)
    return PagedBatch(tuple(starts), tuple(counts), *integers, tables.int(), slots)


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_the_list_has_every_tile_once_with_its_page_and_its_number_of_keys() -> None:
    _, _, _, batch, _ = draw(lengths(6, 70, 1), (2, 1), 16, 32, torch.float32)
    tiles = share_out(batch.lengths_S, batch.tables_SP, 1000, 32, 5)
    wanted = [
        (number, batch.tables_SP[number, tile * 16 // 32].item() * 2 + tile % 2, min(16, length - tile * 16))
        for number, length in enumerate(batch.lengths)
        for tile in range(-(-length // 16))
    ]
    count = int(tiles.firsts_S1[-1])
    entries = tiles.entries[:count]
    got = list(zip(tiles.owners[:count].tolist(), (entries // ENTRY).tolist(), (entries % ENTRY).tolist(), strict=True))
    assert got == wanted
    assert tiles.firsts_S1.tolist() == [next(i for i, w in enumerate(wanted) if w[0] == n) for n in range(6)] + [count]


def test_heads_and_pages_that_have_no_whole_tiles_are_left_to_other_kernels() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert takes_evenly(device, 128, 64)
    assert not takes_evenly(device, 128, 16)
    assert not takes_evenly(device, 96, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "heads"), [(256, (16, 8)), (33, (32, 8)), (8, (8, 1))])
@pytest.mark.parametrize("size", [64, 128])
def test_kernel_on_a_gpu(count: int, heads: tuple[int, int], size: int) -> None:
    case = draw(lengths(count, 1500 if count < 100 else 300, count), heads, size, 64, torch.bfloat16, "cuda")
    q, keys, values, batch, _ = case
    wanted = exact(case, size**-0.5, None, None, None)
    for bits in (False, True):
        runs = count_runs(132, heads[1])
        tiles = share_out(batch.lengths_S, batch.tables_SP, *keys.shape[:2], runs, exact=bits, early=True)
        out = even_attention(q, keys, values, tiles, size**-0.5, early=True)
        assert (out.double().cpu() - wanted).abs().max() < 2e-2
        assert not bits or torch.equal(out, triton_attention(q, keys, values, batch, size**-0.5, exact=True))
