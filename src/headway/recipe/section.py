"""What all sections of a recipe share, and the kinds of numbers that they take."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DERIVED", "NotNegative", "Positive", "Section"]

Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
DERIVED: Any = None
"""Default of a number that a section's `_derive` fills in from the others."""


class Section(BaseModel):
    """Shared settings of all sections: frozen, closed to unknown keys, documented by the strings below their fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )
