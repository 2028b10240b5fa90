"""Tokens: 256 random bits, of which the database keeps a digest only.

A slow hash protects guessable passwords; a token cannot be guessed, so that SHA-256 is enough, and each request pays
a microsecond. A token has its own prefix, by which scanners of repositories find leaked ones.
"""

import hashlib
import secrets
from dataclasses import dataclass

from headway.cluster.service.roles import Scope

PREFIX = "hw_"
DAY_S = 86400.0
LIFETIME_S, LONGEST_S = 90 * DAY_S, 366 * DAY_S
"""How long a token is valid: by default, and at most."""


@dataclass(frozen=True)
class Token:
    """What is known of a token: everything but the token itself."""

    id: str
    user: str
    label: str
    scopes: tuple[Scope, ...]
    created: float
    """Unix seconds, as the other times."""
    expires: float | None
    """None: never; only the token that `headway up` makes for itself."""
    revoked: float | None = None

    def valid(self, now: float) -> bool:
        """Whether it may be used at a time."""
        return self.revoked is None and (self.expires is None or now < self.expires)


def new_token() -> str:
    """A token with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """What the database keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()
