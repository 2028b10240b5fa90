"""NF4: against brute force, plain layers with dequantized weights, and bitsandbytes."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.errors import ModelError
from headway.models import empty_decoder, init_weights
from headway.models.lora import CODES as CODES_BUFFER
from headway.models.lora import add_adapters, fill_quantized, initial_adapter, is_adapter
from headway.models.nf4 import BLOCK, CODES, dequantize, nf4_linear, quantize
from headway.recipe import Lora, Model
from own_environment import python_with


def random_weight(outputs: int, inputs: int) -> torch.Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    weight[0, :BLOCK] = 0  # a block without a magnitude
    return weight


def test_every_value_becomes_the_nearest_code_of_its_block() -> None:
    weight = random_weight(6, 3 * BLOCK)
    codes, scales = quantize(weight)
    assert (codes.shape, codes.dtype, scales.shape) == ((6, 96), torch.uint8, (6, 3))
    table = torch.tensor(CODES)
    for row in range(6):
        for block in range(3):
            values = weight[row, block * BLOCK : (block + 1) * BLOCK]
            scale = values.abs().max()
            assert scales[row, block] == scale
            nearest = (values / scale.clamp(min=1e-30)).unsqueeze(1).sub(table).abs().argmin(dim=1)
            packed = codes[row, block * BLOCK // 2 : (block + 1) * BLOCK // 2]
            assert torch.equal(torch.stack((packed >> 4, packed & 15), dim=1).flatten().long(), nearest)
            expected = table[nearest] * scale
            assert torch.equal(dequantize(codes, scales, torch.float32)[row, block * BLOCK :][:BLOCK], expected)


def test_layer_computes_with_the_dequantized_weight_and_keeps_only_codes() -> None:
    weight, bias = random_weight(24, 2 * BLOCK), torch.randn(24)
    codes, scales = quantize(weight)
    plain = dequantize(codes, scales, torch.float32)
    kept = list[torch.Tensor]()
    x = torch.randn(2, 5, 2 * BLOCK, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = nf4_linear(x, codes, scales, bias)
    assert {tuple(t.shape) for t in kept} == {codes.shape, scales.shape}
    y.square().sum().backward()
    gradient, x.grad = x.grad, None
    expected = torch.nn.functional.linear(x, plain, bias)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    torch.testing.assert_close(gradient, x.grad)


def test_decoder_with_quantized_base_is_the_plain_one_with_dequantized_weights() -> None:
    model = Model(layers=2, dim=64, heads=4, kv_heads=2, hidden=128, vocab_size=96, init_std=0.2)
    lora = Lora(rank=2, quantize="nf4", targets=("layers.*.attention.*",))
    plain = empty_decoder(model)
    init_weights(plain, 0)
    quantized = empty_decoder(model)
    add_adapters(quantized, lora)
    with torch.no_grad():
        for name, tensor in plain.named_parameters():
            layer = name.removesuffix(".weight")
            if any(key == f"{layer}.{CODES_BUFFER}" for key, _ in quantized.named_buffers()):
                fill_quantized(quantized.get_submodule(layer), tensor)
                tensor.copy_(dequantize(*quantize(tensor), torch.float32))
            else:
                quantized.get_parameter(name).copy_(tensor)
        for name, parameter in quantized.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_adapter(name, tuple(parameter.shape), 0))
    assert sum(CODES_BUFFER in name for name, _ in quantized.named_buffers()) == 14
    tokens = torch.arange(30).view(2, 15)
    with torch.no_grad():
        torch.testing.assert_close(quantized(tokens), plain(tokens))


def test_layers_that_blocks_do_not_fill_are_refused() -> None:
    model = Model(layers=1, dim=96, heads=4, hidden=128, vocab_size=96)
    with pytest.raises(ModelError, match=r"layers\.0\.attention\.q has 96 inputs, which is no multiple of 64"):
        add_adapters(empty_decoder(model, "meta"), Lora(quantize="nf4"))


BITSANDBYTES = """
import sys, torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
given = load_file(sys.argv[1])
codes, state = functional.quantize_4bit(given["weight"], blocksize=64, quant_type="nf4", compress_statistics=False)
theirs = functional.dequantize_4bit(codes, state)
state.absmax = given["scales"].flatten()
ours = functional.dequantize_4bit(given["codes"].reshape(codes.shape), state)
save_file({"codes": codes.flatten(), "theirs": theirs, "ours": ours}, sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_reads_our_codes_and_makes_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    python = python_with("bitsandbytes==0.50.2")
    weight = random_weight(48, 4 * BLOCK).to(dtype)
    codes, scales = quantize(weight)
    save_file({"weight": weight, "codes": codes, "scales": scales}, tmp_path / "given")
    arguments = [str(tmp_path / "given"), str(tmp_path / "results")]
    done = subprocess.run([str(python), "-c", BITSANDBYTES, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = load_file(tmp_path / "results")
    assert torch.equal(results["ours"], dequantize(codes, scales, dtype))
    assert torch.equal(results["theirs"], results["ours"])
    assert torch.equal(results["codes"], codes.flatten())
