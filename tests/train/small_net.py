"""A small net for tests of optimizers, and gradients for it."""

import torch
from torch import nn


class Net(nn.Module):
    """Two blocks with a wide, a tall and a stacked matrix, a norm and a bias; a table and a head outside."""

    def __init__(self, seed: int = 0, columns: int = 300) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.1)

        self.embed = nn.Embedding(40, 24, _weight=drawn(40, 24))
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.wide, block.tall, block.experts = drawn(24, columns), drawn(300, 24), drawn(3, 16, 24)
            block.norm, block.expert_bias = drawn(24), drawn(3, 24)
            self.blocks.append(block)
        self.head = nn.Parameter(drawn(40, 24))


def gradients(net: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Any, of sizes that differ by orders of magnitude between parameters and between elements."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = {}
    for i, (name, p) in enumerate(net.named_parameters()):
        sizes = torch.rand(p.shape, generator=generator) ** 6
        drawn[name] = torch.randn(p.shape, generator=generator) * sizes * 10.0 ** (-(i % 4))
    return drawn
