"""The base class of recipe sections, and common number types."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
DERIVED: Any = None
"""Default of a field that a section's `_derive` fills in from others."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, documented by the docstrings below the fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )
