"""What a reward is given: an answer, and the prompt that it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import DataError, suggest


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a prompt: `def reward(answer: Answer, **args) -> float`."""

    text: str
    """What the model wrote, without special tokens."""
    prompt: str
    """What it answers: the user's text, or all messages as JSON."""
    fields: Mapping[str, Any]
    """The other fields of the prompt's row, as JSON has them."""
    tokens: int
    """Tokens that the model wrote."""
    finish: str
    """`stop`; `length` if it was cut at rl.max_tokens; or what an environment ended with."""

    def field(self, name: str) -> Any:
        """Return a field of the prompt's row; raise DataError if the row has none of this name."""
        if name not in self.fields:
            hint = suggest(name, map(str, self.fields), "headway data show lists them") if self.fields else None
            raise DataError(f"the prompt's row has no field {name!r}", hint=hint)
        return self.fields[name]
