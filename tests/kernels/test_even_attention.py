"""Attention with tiles shared out evenly, against sums over a float64 softmax, in Triton's interpreter and on a GPU."""

import random
from collections.abc import Iterator

import pytest
import torch
from test_paged_attention import draw, exact

from headway.kernels import even_attention as kernel
from headway.kernels.even_attention import ENTRY, EvenTiling, even_attention, share_out, takes_evenly

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "KEYS", 16)
    return


def lengths(count: int, longest: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(1, rng.randint(1, longest)) for _ in range(count)]


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("count", "processors", "page", "heads"),
    [
        pytest.param(9, 4, 16, (4, 2), id="sequences end in other programs than they begin in"),
        pytest.param(1, 8, 32, (6, 2), id="one sequence in many programs"),
        pytest.param(2, 40, 16, (2, 1), id="more programs than tiles"),
        pytest.param(7, 1, 16, (4, 4), id="one program"),
    ],
)
def test_each_query_attends_to_all_keys_of_its_sequence(
    count: int, processors: int, page: int, heads: tuple[int, int]
) -> None:
    case = draw(lengths(count, 90, count), heads, 16, page, torch.float32)
    q, keys, values, batch, whole = case
    for pages in (keys, values):  # what is beyond a sequence's end is never read into a sum
        for row, length in zip(batch.tables_SP.tolist(), batch.lengths, strict=True):
            if length % page:
                pages[row[length // page], length % page :] = float("nan")
    tiles = share_out(batch.lengths_S, batch.tables_SP, page)
    out = even_attention(q, keys, values, tiles, 0.25, processors, EvenTiling(programs=2))
    assert (out.double() - exact(case, 0.25, None, None, None)).abs().max() < 1e-5
    assert len(whole) == count


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_the_list_has_every_tile_once_with_its_page_and_its_number_of_keys() -> None:
    _, _, _, batch, _ = draw(lengths(6, 70, 1), (2, 1), 16, 32, torch.float32)
    tiles = share_out(batch.lengths_S, batch.tables_SP, 32)
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
    tiles = share_out(batch.lengths_S, batch.tables_SP, 64, early=True)
    out = even_attention(q, keys, values, tiles, size**-0.5, 132, early=True)
    wanted = exact(case, size**-0.5, None, None, None)
    assert (out.double().cpu() - wanted).abs().max() < 2e-2
