"""Tenants: headroom against brute force, and recent usage against its closed form."""

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
class TreeTenant:
    """A tenant of a test tree."""

    above: int | None
    guarantee: int
    borrow: int | None
    lend: int | None
    own_gpus: int
    """GPUs of its own jobs, without its children's."""


@st.composite
def trees(draw: st.DrawFn, *, flat: bool = False, lend_below: bool = False) -> tuple[list[TreeTenant], int]:
    """Tenants with feasible guarantees, parents first, and the free GPUs."""
    tree, unpromised = list[TreeTenant](), list[int]()
    gpus = draw(st.integers(0, 12))
    most = gpus
    limit = st.none() | st.integers(0, 6)
    for number in range(draw(st.integers(1, 5))):
        above = None if flat or not number else draw(st.none() | st.integers(0, number - 1))
        guarantee = draw(st.integers(0, most if above is None else unpromised[above]))
        if above is None:
            most -= guarantee
        else:
            unpromised[above] -= guarantee
        unpromised.append(guarantee)
        lend = draw(limit) if above is None or lend_below else None
        tree.append(TreeTenant(above, guarantee, draw(limit), lend, draw(st.integers(0, 4))))
    used = sum(tenant.own_gpus for tenant in tree)
    assume(used <= gpus)
    return tree, gpus - used


def make_table(tree: list[TreeTenant]) -> TenantTable:
    tenants = TenantTable()
    for number, tenant in enumerate(tree):
        parent = None if tenant.above is None else f"t{tenant.above}"
        assert tenants.add_tenant(f"t{number}", tenant.guarantee, parent, tenant.borrow, tenant.lend) == number
    for number, tenant in enumerate(tree):
        tenants.add_used(number, tenant.own_gpus)
    return tenants


def path(tree: list[TreeTenant], number: int | None) -> list[int]:
    return [] if number is None else [number, *path(tree, tree[number].above)]


def usage(tree: list[TreeTenant]) -> list[int]:
    return [
        sum(tenant.own_gpus for low, tenant in enumerate(tree) if high in path(tree, low)) for high in range(len(tree))
    ]


def withheld(tree: list[TreeTenant], number: int) -> int:
    """Return the unused guarantee that a tenant does not lend."""
    tenant = tree[number]
    return 0 if tenant.lend is None else max(tenant.guarantee - usage(tree)[number] - tenant.lend, 0)


def may_take(tree: list[TreeTenant], free: int, number: int, gpus: int) -> bool:
    """Apply the rule: GPUs are free, no ancestor exceeds its limit, and what others withhold stays free."""
    line, used = path(tree, number), usage(tree)
    within = all(tree[row].borrow is None or used[row] + gpus <= tree[row].guarantee + tree[row].borrow for row in line)
    others = sum(withheld(tree, row) for row in range(len(tree)) if tree[row].above is None and row not in line)
    return within and gpus + others <= free


@settings(max_examples=examples(100), deadline=None)
@given(st.one_of(trees(flat=True), trees()))
def test_headroom_is_what_the_rule_allows_and_no_more(case):
    tree, free = case
    assume(free >= sum(withheld(tree, row) for row in range(len(tree)) if tree[row].above is None))
    headroom = make_table(tree).headroom(free)
    want = [max([0, *(k for k in range(1, free + 1) if may_take(tree, free, row, k))]) for row in range(len(tree))]
    assert headroom.tolist() == want


@settings(max_examples=examples(70), deadline=None)
@given(trees(flat=True), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=12))
def test_gpus_a_tenant_does_not_lend_stay_free_for_it(case, takes):
    tree, free = case
    tenants, free = make_table(tree), free + sum(tenant.own_gpus for tenant in tree)
    tenants.used[:] = 0
    for row, gpus in takes:
        row %= len(tree)
        gpus = min(gpus, int(tenants.headroom(free)[row]))
        tenants.add_used(row, gpus)
        free -= gpus
        for other, tenant in enumerate(tree):
            if tenant.lend is not None:
                assert tenants.headroom(free)[other] >= tenant.guarantee - int(tenants.used[other]) - tenant.lend


@settings(max_examples=examples(70), deadline=None)
@given(trees(lend_below=True), st.data())
def test_headroom_with_other_usage_changes_nothing(case, data):
    """It equals the headroom of a tree with that usage."""
    tree, free = case
    tenants = make_table(tree)
    before = tenants.used.copy()
    other = [data.draw(st.integers(0, 4)) for _ in tree]
    tried = make_table(
        [
            TreeTenant(tenant.above, tenant.guarantee, tenant.borrow, tenant.lend, own_gpus)
            for tenant, own_gpus in zip(tree, other, strict=True)
        ]
    )
    assert tenants.headroom(free, tried.used[: len(tree)]).tolist() == tried.headroom(free).tolist()
    assert tenants.used.tolist() == before.tolist()


@settings(max_examples=examples(100), deadline=None)
@given(trees(lend_below=True))
def test_usage_of_a_team_counts_for_its_department(case):
    tree, _ = case
    tenants = make_table(tree)
    assert tenants.used[: len(tree)].tolist() == usage(tree)
    for row in range(len(tree)):
        assert tenants.path(row).tolist() == path(tree, row)
    assert list(tenants.leaves()) == [row for row in range(len(tree)) if row not in {tenant.above for tenant in tree}]
    for row, tenant in enumerate(tree):
        tenants.add_used(row, -tenant.own_gpus)
    assert not tenants.used.any()


def table_of(*rows: tuple[str, int, str | None, int | None, int | None, int]) -> TenantTable:
    tenants = TenantTable()
    for *row, used in rows:
        tenants.add_used(tenants.add_tenant(*row), used)
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
        ("withholds nothing of what it uses", [("a", 2, None, None, None, 0), ("b", 6, None, None, 0, 6)], 2, [2, 2]),
        ("no more than its department", [("d", 4, None, 0, None, 0), ("t", 4, "d", 4, None, 0)], 8, [4, 4]),
        (
            "a team's guarantee is within what its department withholds",
            [("d", 8, None, None, 0, 0), ("t", 8, "d", None, None, 0), ("e", 0, None, None, None, 0)],
            8,
            [8, 8, 0],
        ),
        (
            "what one team uses another cannot use",
            [("d", 4, None, 0, None, 0), ("s", 2, "d", None, None, 3), ("t", 2, "d", None, None, 0)],
            8,
            [1, 1, 1],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_headroom_examples(name, rows, free, want):
    assert table_of(*rows).headroom(free).tolist() == want


def test_team_withholds_what_it_does_not_lend_from_siblings():
    tenants = table_of(("d", 8, None, None, None, 0), ("s", 4, "d", None, 0, 0), ("t", 4, "d", None, None, 0))
    assert tenants.headroom(8).tolist()[1:] == [8, 4]


def test_gpus_are_not_left_idle_if_fewer_are_free_than_withheld():
    """Half of the nodes are missing: both are within their guarantees, so one of them has to get what is left."""
    tenants = table_of(("a", 4, None, None, 0, 0), ("b", 4, None, None, 0, 0))
    assert tenants.headroom(4).max() > 0


# -- guarantees


@settings(max_examples=examples(70), deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=5), st.integers(0, 12)
)
def test_guarantees_are_checked_against_the_cluster_and_parents(rows, gpus):
    tree = [
        TreeTenant(above if above is not None and above < row else None, g, None, None, 0)
        for row, (above, g) in enumerate(rows)
    ]
    sums = {
        above: sum(tenant.guarantee for tenant in tree if tenant.above == above) for above in (None, *range(len(tree)))
    }
    fits = all(total <= (gpus if above is None else tree[above].guarantee) for above, total in sums.items())
    if fits:
        make_table(tree).check_guarantees(gpus)
    else:
        with pytest.raises(UsageError, match="guarantees add up to"):
            make_table(tree).check_guarantees(gpus)


def test_error_names_the_guarantees_that_add_up_to_too_much():
    with pytest.raises(UsageError, match=r"^guarantees add up to 9 GPUs \(a 4, b 5\); the cluster has 8$"):
        table_of(("a", 4, None, None, None, 0), ("b", 5, None, None, None, 0)).check_guarantees(8)
    with pytest.raises(UsageError, match=r"^guarantees add up to 5 GPUs \(t 5\); d has 4$"):
        table_of(("d", 4, None, None, None, 0), ("t", 5, "d", None, None, 0)).check_guarantees(8)


# -- bad input


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("negative", ("a", -1), "tenant a: guarantee is -1"),
        ("fractional", ("a", 1.5), "tenant a: guarantee is 1.5"),
        ("negative borrowing", ("a", 1, None, -2), "tenant a: borrow is -2"),
        ("fractional lending", ("a", 1, None, None, 0.5), "tenant a: lend is 0.5"),
        ("duplicate", ("old", 1), "duplicate tenant 'old'"),
        ("unknown parent", ("a", 1, "who"), "tenant a: unknown parent 'who'"),
        ("its own parent", ("a", 1, "a"), "tenant a: unknown parent 'a'"),
        ("not a number", ("a", math.nan), "tenant a: guarantee is nan"),
        ("infinite", ("a", math.inf), "tenant a: guarantee is inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_tenant_is_rejected_and_leaves_nothing(name, row, message):
    tenants = table_of(("old", 4, None, None, None, 0))
    with pytest.raises(UsageError) as error:
        tenants.add_tenant(*row)
    assert error.value.message == message
    assert len(tenants) == 1
    assert tenants.add_tenant("new", 1, "old") == 1
    assert tenants.path(1).tolist() == [1, 0]


def test_cycle_of_tenants_is_rejected():
    """Parents are listed first, and no tenant twice: the first of a cycle always has an unknown parent."""
    tenants = TenantTable()
    with pytest.raises(UsageError, match="tenant a: unknown parent 'b'"):
        tenants.add_tenant("a", 1, "b")
    tenants.add_tenant("b", 1)
    tenants.add_tenant("a", 1, "b")
    with pytest.raises(UsageError, match="duplicate tenant 'b'"):
        tenants.add_tenant("b", 1, "a")


# -- recent use


def closed_form(pieces: list[tuple[float, int]]) -> float:
    """Return GPU-seconds with a half-life: the decayed integral of usage over each piece."""
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
def test_recent_usage_does_not_depend_on_time_steps(pieces, cuts):
    whole, cut = table_of(("a", 1, None, None, None, 0)), table_of(("a", 1, None, None, None, 0))
    for (seconds, used), parts in zip(pieces, cuts, strict=False):
        whole.used[0] = cut.used[0] = used
        whole.advance(seconds)
        for _ in range(parts):
            cut.advance(seconds / parts)
    assert cut.recent[0] == pytest.approx(whole.recent[0], rel=1e-9)
    assert whole.recent[0] == pytest.approx(closed_form(pieces), rel=1e-9)


def test_recent_usage_is_accurate_in_very_small_time_steps():
    tenants = table_of(("a", 1, None, None, None, 8))
    for _ in range(10_000):
        tenants.advance(1e-4)
    assert tenants.recent[0] == pytest.approx(8.0, rel=1e-5)


def test_usage_counts_half_after_its_half_life():
    tenants = table_of(("d", 4, None, None, None, 0), ("t", 4, "d", None, None, 0))
    tenants.recent[:2] = [100.0, 60.0]
    tenants.advance(HALF_LIFE_S)
    assert tenants.recent[:2].tolist() == [50.0, 30.0]
    tenants.advance(0.0)
    assert tenants.recent[:2].tolist() == [50.0, 30.0]


def test_recent_usage_of_a_department_is_that_of_its_teams():
    tenants = table_of(("d", 4, None, None, None, 0), ("s", 2, "d", None, None, 3), ("t", 2, "d", None, None, 1))
    tenants.advance(1000.0)
    assert tenants.recent[0] == pytest.approx(tenants.recent[1] + tenants.recent[2])


def test_usage_ratio_is_one_if_usage_matches_guarantees():
    tenants = table_of(("a", 6, None, None, None, 0), ("b", 2, None, None, None, 0))
    assert tenants.usage_ratios().tolist() == [0.0, 0.0]
    tenants.recent[:2] = [300.0, 100.0]
    assert tenants.usage_ratios() == pytest.approx([1.0, 1.0])
    tenants.recent[:2] = [100.0, 300.0]
    assert tenants.usage_ratios() == pytest.approx([1 / 3, 3.0])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1e9)), min_size=1, max_size=5))
def test_usage_ratios_weighted_by_guarantees_average_to_one(rows):
    tenants = table_of(*((f"t{row}", guarantee, None, None, None, 0) for row, (guarantee, _) in enumerate(rows)))
    tenants.recent[: len(rows)] = [recent for _, recent in rows]
    guarantees = np.array([guarantee for guarantee, _ in rows])
    total = float((tenants.usage_ratios() * guarantees).sum() / guarantees.sum())
    assert total == pytest.approx(1.0 if any(recent > 0 for _, recent in rows) else 0.0)
