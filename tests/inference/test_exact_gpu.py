"""Exact mode on a GPU in bfloat16, part by part of `benchmarks/exact_gpu.py`: thousands of tokens per family."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "exact_gpu.py"
    spec = importlib.util.spec_from_file_location("exact_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def wrong(rows: Any) -> list[Any]:
    return [row for row in rows if not row.fine]


PARTS = ["products", "experts", "norms", "rotations", "activations", "attentions", "logprobs"]


@pytest.mark.parametrize("part", PARTS)
def test_kernels_of_training_and_inference_have_the_same_bits(measured: Any, part: str) -> None:
    assert not wrong(getattr(measured, part)())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_thousands_of_tokens_have_the_trainers_bits_in_every_batch(measured: Any, family: str) -> None:
    assert not wrong(measured.engines(Namespace(families=[family])))


def test_gradients_are_as_near_to_float32_as_plain_ones(measured: Any) -> None:
    assert not wrong(measured.gradients(Namespace(families=["llama", "qwen3", "mixtral"])))
