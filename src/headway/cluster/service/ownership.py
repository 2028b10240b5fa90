"""What a user may submit: jobs of its own, for its tenants. Pure."""

import hashlib
from collections.abc import Collection
from dataclasses import replace

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.service.roles import Principal
from headway.errors import Forbidden


def own_request(request: LaunchRequest, caller: Principal, tenants: Collection[str] | None) -> LaunchRequest:
    """The request of a caller who sees some tenants; an admin (None: all) may submit for anybody."""
    if tenants is None:
        return request
    tenant = request.site.get("tenant") or caller.tenant or ""
    if tenant not in tenants:  # also one that exists
        raise Forbidden(f"unknown tenant '{tenant}'", hint=f"known tenants: {', '.join(sorted(tenants))}")
    return replace(request, site={**request.site, "tenant": tenant, "user": caller.user})


def own_key(key: str | None, caller: Principal) -> str | None:
    """The key of a submission, which no other user's can be equal to."""
    return None if key is None else hashlib.sha256(f"{caller.user}\0{key}".encode()).hexdigest()
