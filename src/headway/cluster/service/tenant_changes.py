"""Changes to the tree of tenants: pure. Tenants are listed parents first, as in cluster.toml."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.cluster.service.roles import subtree
from headway.errors import UsageError

Tenants = list[dict[str, Any]]


def with_tenant(tenants: Sequence[Mapping[str, Any]], name: str, change: Mapping[str, Any]) -> Tenants:
    """The tenants with one added or changed: keys that `change` lacks stay as they are; None removes a limit."""
    before = next((tenant for tenant in tenants if tenant["name"] == name), None)
    values = {key: value for key, value in {**(before or {}), "name": name, **change}.items() if value is not None}
    parent = values.get("parent")
    if parent is not None and parent in subtree(tenants, name):
        raise UsageError(f"tenant {name} cannot be below {parent}", hint="a tenant is not below itself")
    if parent is not None and all(tenant["name"] != parent for tenant in tenants):
        raise UsageError(f"tenant {name}: unknown parent '{parent}'", hint="headway tenants lists them")
    if before is None:
        return [*map(dict, tenants), values]
    return parents_first([values if tenant is before else dict(tenant) for tenant in tenants])


def without_tenant(tenants: Sequence[Mapping[str, Any]], name: str) -> Tenants:
    """The tenants without one that has none below it."""
    below = subtree(tenants, name) - {name}
    if below:
        raise UsageError(f"tenant {name} has tenants below it: {', '.join(sorted(below))}", hint="remove those first")
    return [dict(tenant) for tenant in tenants if tenant["name"] != name]


def parents_first(tenants: Sequence[Mapping[str, Any]]) -> Tenants:
    """The same tenants, each after its parent, else in the same order."""
    listed, left = list[dict[str, Any]](), [dict(tenant) for tenant in tenants]
    while left:
        names = {tenant["name"] for tenant in listed}
        ready = [tenant for tenant in left if tenant.get("parent") is None or tenant["parent"] in names]
        assert ready, "a tree has a top"
        listed += ready
        left = [tenant for tenant in left if tenant not in ready]
    return listed


def tenants_at_start(
    listed: Tenants | None, listed_before: Tenants | None, recorded: Tenants | None, default: Tenants
) -> Tenants:
    """The tenants that a service starts with.

    Those that it ended with, with all changes that were made by users; but those of its file if the file has changed
    since, or was never read.
    """
    if listed is not None and (recorded is None or listed != listed_before):
        return listed
    return default if recorded is None else recorded
