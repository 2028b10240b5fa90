"""The interface of environments: the model writes a turn, the environment replies, until one of them ends the answer.

Texts go in and out; tokens are Headway's. What the model wrote stays the tokens that were sampled. The text of a reply
is encoded once and appended to them, and the model's next turn continues from exactly these tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote in one turn."""

    text: str
    """Without special tokens."""
    number: int
    """1 for the first turn of an answer."""
    prompt: str
    """What is answered: the user's text, or all messages as JSON."""
    fields: Mapping[str, Any]
    """The other fields of the prompt's row, as JSON has them."""
    state: Any
    """What the reply to the turn before left; None in the first turn."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to a turn."""

    text: str = ""
    """What follows the model's turn, up to where its next one begins, special tokens and all."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Instead of the text: messages such as a user's or a tool's, as the chat template writes them there."""
    done: bool = False
    """Whether the answer ends here; nothing is appended then."""
    reward: float | None = None
    """Added to those of the answer's other turns: the term `environment` of its reward."""
    state: Any = None
    """Any JSON, for the next turn of this answer."""


class Environment(Protocol):
    """A user's class; its constructor takes `rl.environment_args`.

    An object serves many answers, and any of several processes takes the next turn of one. So what it knows of an
    answer goes through `state`, and a process that dies takes nothing with it but the call that it was running.
    """

    def reply(self, turn: Turn) -> Reply:
        """Return what the environment says to a turn."""
        ...
