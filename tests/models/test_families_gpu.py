"""Every family on a GPU, compiled and not, with packed documents: about what a CPU makes of it in float32."""

from pathlib import Path

import pytest
import torch
from family_cases import Case, load, make
from test_families import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled_and_eager_on_a_gpu(case: Case, tmp_path: Path) -> None:
    """Loss and gradients in float32, in three ways."""
    make(case, tmp_path)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 200, (2, 129), generator=generator)
    documents = (torch.rand(2, 128, generator=generator) < 0.03).int().cumsum(1).int()
    results = []
    for device, compiled in (("cpu", False), ("cuda", False), ("cuda", True)):
        torch._dynamo.reset()
        decoder = load(tmp_path).to(device)
        if compiled:
            for block in decoder.layers:
                block.forward = torch.compile(block.forward)
        loss = decoder(tokens[:, :-1].to(device), tokens[:, 1:].to(device), documents.to(device))
        loss.backward()
        gradients = {name: p.grad.cpu() for name, p in decoder.named_parameters() if p.grad is not None}
        results.append((loss.item(), gradients))
    truth, gradients = results[0]
    for loss, others in results[1:]:
        assert loss == pytest.approx(truth, rel=1e-4)
        assert others.keys() == gradients.keys()
        size = sum(g.double().square().sum() for g in gradients.values()).sqrt()
        apart = sum((others[name] - g).double().square().sum() for name, g in gradients.items()).sqrt()
        assert apart <= 2e-3 * size
