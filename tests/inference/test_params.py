"""Sampling parameters in Python: checked when they are made, with the errors of the JSONL input."""

from typing import Any

import pytest

from headway.errors import RequestError
from headway.inference import SamplingParams


@pytest.mark.parametrize(
    ("given", "message", "hint", "param"),
    [
        ({"temprature": 1}, "unknown parameter 'temprature'", "did you mean temperature", "temprature"),
        ({"temperature": -1}, "temperature: input should be greater than or equal to 0", None, "temperature"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens (3) is more than max_tokens (2)", None, None),
    ],
)
def test_wrong_parameters_are_refused_by_name(
    given: dict[str, Any], message: str, hint: str | None, param: str | None
) -> None:
    for make in (lambda: SamplingParams(**given), lambda: SamplingParams.model_validate(given)):
        with pytest.raises(RequestError) as raised:
            make()
        assert raised.value.message == message
        assert (raised.value.hint or "").startswith(hint or "")
        assert (raised.value.hint is None) == (hint is None)
        assert raised.value.facts == {"param": param}


def test_parameters_are_copied_and_compared_as_values() -> None:
    params = SamplingParams(temperature=0.5, stop="a")
    assert params.stop == ("a",)
    assert params.model_copy(update={"seed": 1}) == SamplingParams(temperature=0.5, stop="a", seed=1)
    assert SamplingParams.model_validate(params.model_dump()) == params
