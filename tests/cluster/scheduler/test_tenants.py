"""Tenants: what each may take against a truth by brute force, and recent use against its closed form."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.tenants import HALF_LIFE_S, TenantTable
from headway.errors import UsageError
from thinned import examples


@dataclass(frozen=True)
class One:
    """A tenant as the tests know it."""

    above: int | None
    guarantee: int
    borrow: int | None
    lend: int | None
    own: int
    """GPUs its own jobs use, its children's not among them."""


@st.composite
def trees(draw: st.DrawFn, *, flat: bool = False, lend_below: bool = False) -> tuple[list[One], int]:
    """Tenants whose guarantees can be kept, parents first, and free GPUs beside what they use."""
    found, left = list[One](), list[int]()
    gpus = draw(st.integers(0, 12))
    most = gpus
    limit = st.none() | st.integers(0, 6)
    for number in range(draw(st.integers(1, 5))):
        above = None if flat or not number else draw(st.none() | st.integers(0, number - 1))
        guarantee = draw(st.integers(0, most if above is None else left[above]))
        if above is None:
            most -= guarantee
        else:
            left[above] -= guarantee
        left.append(guarantee)
        lend = draw(limit) if above is None or lend_below else None
        found.append(One(above, guarantee, draw(limit), lend, draw(st.integers(0, 4))))
    used = sum(one.own for one in found)
    assume(used <= gpus)
    return found, gpus - used


def make(tree: list[One]) -> TenantTable:
    tenants = TenantTable()
    for number, one in enumerate(tree):
        parent = None if one.above is None else f"t{one.above}"
        assert tenants.join(f"t{number}", one.guarantee, parent, one.borrow, one.lend) == number
    for number, one in enumerate(tree):
        tenants.take(number, one.own)
    return tenants


def path(tree: list[One], number: int | None) -> list[int]:
    return [] if number is None else [number, *path(tree, tree[number].above)]


def use(tree: list[One]) -> list[int]:
    return [sum(one.own for low, one in enumerate(tree) if high in path(tree, low)) for high in range(len(tree))]


def kept(tree: list[One], number: int) -> int:
    """What a tenant has, does not use and does not lend."""
    one = tree[number]
    return 0 if one.lend is None else max(one.guarantee - use(tree)[number] - one.lend, 0)


def may_take(tree: list[One], free: int, number: int, gpus: int) -> bool:
    """The rule in words: GPUs are free, nobody on the way up is above its limit, and what others keep is left over."""
    line, used = path(tree, number), use(tree)
    within = all(tree[row].borrow is None or used[row] + gpus <= tree[row].guarantee + tree[row].borrow for row in line)
    others = sum(kept(tree, row) for row in range(len(tree)) if tree[row].above is None and row not in line)
    return within and gpus + others <= free


@settings(max_examples=examples(100), deadline=None)
@given(st.one_of(trees(flat=True), trees()))
def test_a_tenant_may_take_what_the_rule_allows_and_no_more(case):
    tree, free = case
    assume(free >= sum(kept(tree, row) for row in range(len(tree)) if tree[row].above is None))
    room = make(tree).room(free)
    want = [max([0, *(k for k in range(1, free + 1) if may_take(tree, free, row, k))]) for row in range(len(tree))]
    assert room.tolist() == want


@settings(max_examples=examples(70), deadline=None)
@given(trees(flat=True), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=12))
def test_what_a_tenant_keeps_is_there_whatever_others_were_allowed_to_take(case, takes):
    tree, free = case
    tenants, free = make(tree), free + sum(one.own for one in tree)
    tenants.used[:] = 0
    for row, gpus in takes:
        row %= len(tree)
        gpus = min(gpus, int(tenants.room(free)[row]))
        tenants.take(row, gpus)
        free -= gpus
        for other, one in enumerate(tree):
            if one.lend is not None:
                assert tenants.room(free)[other] >= one.guarantee - int(tenants.used[other]) - one.lend


@settings(max_examples=examples(70), deadline=None)
@given(trees(lend_below=True), st.data())
def test_what_is_tried_is_not_counted(case, data):
    """`room` with other numbers of used GPUs is that of a tree where they are used, and leaves this one alone."""
    tree, free = case
    tenants = make(tree)
    before = tenants.used.copy()
    other = [data.draw(st.integers(0, 4)) for _ in tree]
    tried = make(
        [One(one.above, one.guarantee, one.borrow, one.lend, own) for one, own in zip(tree, other, strict=True)]
    )
    assert tenants.room(free, tried.used[: len(tree)]).tolist() == tried.room(free).tolist()
    assert tenants.used.tolist() == before.tolist()


@settings(max_examples=examples(100), deadline=None)
@given(trees(lend_below=True))
def test_what_a_team_uses_its_department_uses_too(case):
    tree, _ = case
    tenants = make(tree)
    assert tenants.used[: len(tree)].tolist() == use(tree)
    for row in range(len(tree)):
        assert tenants.path(row).tolist() == path(tree, row)
    assert list(tenants.leaves()) == [row for row in range(len(tree)) if row not in {one.above for one in tree}]
    for row, one in enumerate(tree):
        tenants.take(row, -one.own)
    assert not tenants.used.any()


def joined(*rows: tuple[str, int, str | None, int | None, int | None, int]) -> TenantTable:
    tenants = TenantTable()
    for *row, used in rows:
        tenants.take(tenants.join(*row), used)
    return tenants


@pytest.mark.parametrize(
    ("name", "rows", "free", "want"),
    [
        ("alone", [("a", 8, None, None, None, 0)], 8, [8]),
        ("borrows all that is free", [("a", 2, None, None, None, 4), ("b", 6, None, None, None, 0)], 4, [4, 4]),
        ("borrows without a guarantee", [("a", 0, None, None, None, 4), ("b", 8, None, None, None, 0)], 4, [4, 4]),
        ("borrows up to its limit", [("a", 2, None, 1, None, 0), ("b", 6, None, 0, None, 0)], 8, [3, 6]),
        ("has borrowed all it may", [("a", 2, None, 1, None, 3), ("b", 6, None, 0, None, 0)], 5, [0, 5]),
        ("lends up to its limit", [("a", 2, None, None, None, 0), ("b", 6, None, None, 1, 0)], 8, [3, 8]),
        ("lends none", [("a", 2, None, None, None, 0), ("b", 6, None, None, 0, 2)], 6, [2, 6]),
        ("keeps nothing of what it uses", [("a", 2, None, None, None, 0), ("b", 6, None, None, 0, 6)], 2, [2, 2]),
        ("no more than its department", [("d", 4, None, 0, None, 0), ("t", 4, "d", 4, None, 0)], 8, [4, 4]),
        (
            "a team's guarantee is within what its department keeps",
            [("d", 8, None, None, 0, 0), ("t", 8, "d", None, None, 0), ("e", 0, None, None, None, 0)],
            8,
            [8, 8, 0],
        ),
        (
            "what one team uses another has no more",
            [("d", 4, None, 0, None, 0), ("s", 2, "d", None, None, 3), ("t", 2, "d", None, None, 0)],
            8,
            [1, 1, 1],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_room(name, rows, free, want):
    assert joined(*rows).room(free).tolist() == want


def test_a_team_keeps_what_it_does_not_lend_from_its_siblings_too():
    tenants = joined(("d", 8, None, None, None, 0), ("s", 4, "d", None, 0, 0), ("t", 4, "d", None, None, 0))
    assert tenants.room(8).tolist()[1:] == [8, 4]


def test_gpus_are_not_left_idle_where_there_are_fewer_than_are_kept():
    """Half of the nodes are away: both are within their guarantees, so one of them has to have what is left."""
    tenants = joined(("a", 4, None, None, 0, 0), ("b", 4, None, None, 0, 0))
    assert tenants.room(4).max() > 0


# -- guarantees


@settings(max_examples=examples(70), deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=5), st.integers(0, 12)
)
def test_guarantees_are_checked_against_the_cluster_and_parents(rows, gpus):
    tree = [
        One(above if above is not None and above < row else None, g, None, None, 0)
        for row, (above, g) in enumerate(rows)
    ]
    sums = {above: sum(one.guarantee for one in tree if one.above == above) for above in (None, *range(len(tree)))}
    fits = all(total <= (gpus if above is None else tree[above].guarantee) for above, total in sums.items())
    if fits:
        make(tree).check(gpus)
    else:
        with pytest.raises(UsageError, match="guarantees add up to"):
            make(tree).check(gpus)


def test_who_promises_too_much_is_named():
    with pytest.raises(UsageError, match=r"^guarantees add up to 9 GPUs \(a 4, b 5\), and the cluster has 8$"):
        joined(("a", 4, None, None, None, 0), ("b", 5, None, None, None, 0)).check(8)
    with pytest.raises(UsageError, match=r"^guarantees add up to 5 GPUs \(t 5\), and d has 4$"):
        joined(("d", 4, None, None, None, 0), ("t", 5, "d", None, None, 0)).check(8)


# -- bad input


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("negative", ("a", -1), "tenant a: guarantee is -1"),
        ("fractional", ("a", 1.5), "tenant a: guarantee is 1.5"),
        ("negative borrowing", ("a", 1, None, -2), "tenant a: borrow is -2"),
        ("fractional lending", ("a", 1, None, None, 0.5), "tenant a: lend is 0.5"),
        ("twice", ("old", 1), "tenant old is named twice"),
        ("of nobody", ("a", 1, "who"), "tenant a belongs to who, whom nobody has named"),
        ("of itself", ("a", 1, "a"), "tenant a belongs to a, whom nobody has named"),
        ("not a number", ("a", math.nan), "tenant a: guarantee is nan"),
        ("endless", ("a", math.inf), "tenant a: guarantee is inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tenants_are_refused_in_one_sentence_and_leave_nothing(name, row, says):
    tenants = joined(("old", 4, None, None, None, 0))
    with pytest.raises(UsageError) as error:
        tenants.join(*row)
    assert error.value.message == says
    assert len(tenants) == 1
    assert tenants.join("new", 1, "old") == 1
    assert tenants.path(1).tolist() == [1, 0]


def test_cycles_cannot_be_made():
    """A parent is named before its children, and nobody twice: the first of a cycle always has an unknown parent."""
    tenants = TenantTable()
    with pytest.raises(UsageError, match="a belongs to b, whom nobody has named"):
        tenants.join("a", 1, "b")
    tenants.join("b", 1)
    tenants.join("a", 1, "b")
    with pytest.raises(UsageError, match="b is named twice"):
        tenants.join("b", 1, "a")


# -- recent use


def closed(pieces: list[tuple[float, int]]) -> float:
    """GPU-seconds with a half-life: each piece's integral of use, as far back as it lies by the end."""
    rate, later, total = math.log(2) / HALF_LIFE_S, 0.0, 0.0
    for seconds, used in reversed(pieces):
        total += used / rate * (math.exp(-rate * later) - math.exp(-rate * (later + seconds)))
        later += seconds
    return total


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.floats(1, 30 * 86400), st.integers(0, 1000)), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), min_size=6, max_size=6),
)
def test_recent_use_is_the_same_however_time_is_cut_up(pieces, cuts):
    whole, cut = joined(("a", 1, None, None, None, 0)), joined(("a", 1, None, None, None, 0))
    for (seconds, used), parts in zip(pieces, cuts, strict=False):
        whole.used[0] = cut.used[0] = used
        whole.age(seconds)
        for _ in range(parts):
            cut.age(seconds / parts)
    assert cut.recent[0] == pytest.approx(whole.recent[0], rel=1e-9)
    assert whole.recent[0] == pytest.approx(closed(pieces), rel=1e-9)


def test_recent_use_is_right_in_very_small_cuts_too():
    tenants = joined(("a", 1, None, None, None, 8))
    for _ in range(10_000):
        tenants.age(1e-4)
    assert tenants.recent[0] == pytest.approx(8.0, rel=1e-5)


def test_use_counts_half_after_its_half_life():
    tenants = joined(("d", 4, None, None, None, 0), ("t", 4, "d", None, None, 0))
    tenants.recent[:2] = [100.0, 60.0]
    tenants.age(HALF_LIFE_S)
    assert tenants.recent[:2].tolist() == [50.0, 30.0]
    tenants.age(0.0)
    assert tenants.recent[:2].tolist() == [50.0, 30.0]


def test_a_departments_recent_use_is_that_of_its_teams():
    tenants = joined(("d", 4, None, None, None, 0), ("s", 2, "d", None, None, 3), ("t", 2, "d", None, None, 1))
    tenants.age(1000.0)
    assert tenants.recent[0] == pytest.approx(tenants.recent[1] + tenants.recent[2])


def test_shares_are_one_where_use_is_as_promised():
    tenants = joined(("a", 6, None, None, None, 0), ("b", 2, None, None, None, 0))
    assert tenants.shares().tolist() == [0.0, 0.0]
    tenants.recent[:2] = [300.0, 100.0]
    assert tenants.shares() == pytest.approx([1.0, 1.0])
    tenants.recent[:2] = [100.0, 300.0]
    assert tenants.shares() == pytest.approx([1 / 3, 3.0])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1e9)), min_size=1, max_size=5))
def test_shares_weighted_by_guarantees_add_up_to_one(rows):
    tenants = joined(*((f"t{row}", guarantee, None, None, None, 0) for row, (guarantee, _) in enumerate(rows)))
    tenants.recent[: len(rows)] = [recent for _, recent in rows]
    guarantees = np.array([guarantee for guarantee, _ in rows])
    total = float((tenants.shares() * guarantees).sum() / guarantees.sum())
    assert total == pytest.approx(1.0 if any(recent > 0 for _, recent in rows) else 0.0)
