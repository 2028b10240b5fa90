"""The decoder against independent truths: another way to the same number, and what must not change it."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from headway.models import Decoder, empty_decoder, init_weights, initial_weight
from headway.models.layers import RMSNorm
from headway.models.loss import CHUNK_ELEMENTS, summed_cross_entropy
from headway.models.rotary import rotary_table, rotate
from headway.recipe import Model
from thinned import examples

# A CPU without bfloat16 instructions says so, once, and computes all the same.
no_bfloat16_cpu = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

SMALL = Model(vocab_size=97, layers=2, dim=32, heads=4, kv_heads=2, hidden=48)
EVERYTHING = SMALL.model_copy(
    update={"tie_embeddings": False, "qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
)


def build(model: Model, seed: int = 0) -> Decoder:
    decoder = empty_decoder(model)
    init_weights(decoder, seed)
    return decoder


def batch(rows: int = 2, length: int = 13, vocab: int = 97, seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", [SMALL, EVERYTHING], ids=["plain", "everything"])
def test_names_and_shapes_are_the_plan_s(model: Model) -> None:
    shapes = {name: tuple(p.shape) for name, p in empty_decoder(model).named_parameters()}
    assert list(shapes.items()) == list(model.tensors().items())
    assert set(empty_decoder(model).state_dict()) == set(shapes)  # no buffers


@pytest.mark.parametrize("model", [SMALL, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("elements", [1, 97 * 5, 2**20])
def test_loss_and_gradients_equal_torch_s(model: Model, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", elements)
    tokens, labels = batch()
    labels[0, :5] = -100
    decoder, truth = build(model), build(model)

    loss = decoder(tokens, labels)
    (loss / 7).backward()
    expected = functional.cross_entropy(truth(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    (expected / 7).backward()

    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, want in gradients(truth).items():
        torch.testing.assert_close(gradients(decoder)[name], want, rtol=1e-4, atol=1e-6, msg=name)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 40), st.integers(1, 23), st.integers(1, 200), st.floats(0.01, 50.0), st.integers(0, 2**32))
def test_summed_cross_entropy_against_float64(tokens: int, vocab: int, elements: int, scale: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 6, generator=draw) * scale
    weight = torch.randn(vocab, 6, generator=draw)
    labels = torch.randint(vocab, (tokens,), generator=draw)
    labels[torch.rand(tokens, generator=draw) < 0.3] = -100

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHUNK_ELEMENTS, "cpu", elements)
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        loss = summed_cross_entropy(*inputs, labels)
        loss.backward()
    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = functional.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum", ignore_index=-100)
    expected.backward()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-3)
    for got, want in zip(inputs, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-3, atol=1e-4 * (1 + scale))


def test_all_labels_masked_give_zero() -> None:
    decoder = build(SMALL)
    tokens, labels = batch()
    loss = decoder(tokens, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(not grad.any() for grad in gradients(decoder).values())


def test_loss_without_gradients_is_the_same_number() -> None:
    decoder = build(EVERYTHING)
    tokens, labels = batch()
    with torch.no_grad():
        quiet = decoder(tokens, labels)
    assert not quiet.requires_grad
    assert torch.equal(quiet, decoder(tokens, labels).detach())


def test_backward_twice_gives_the_same_gradient() -> None:
    decoder = build(SMALL)
    loss = decoder(*batch())
    loss.backward(retain_graph=True)
    once = gradients(decoder)
    loss.backward()
    for name, grad in gradients(decoder).items():
        torch.testing.assert_close(grad, 2 * once[name])


def test_the_future_does_not_matter() -> None:
    decoder = build(EVERYTHING)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 97
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_positions_are_relative() -> None:
    """A rotary embedding's inner products depend on distances alone."""
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    table = rotary_table(torch.arange(500), SMALL.head_dim, 10_000.0)

    def product(i: int, j: int) -> float:
        return (rotate(q, table[:, i : i + 1]) * rotate(k, table[:, j : j + 1])).sum().item()

    assert product(5, 3) == pytest.approx(product(402, 400), abs=1e-4)
    assert product(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-6)


def test_shared_heads_equal_repeated_ones() -> None:
    grouped = build(SMALL)
    full = empty_decoder(SMALL.model_copy(update={"kv_heads": 4}))
    weights = dict(grouped.named_parameters())
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            source = weights[name]
            if ".k." in name or ".v." in name:
                source = source.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
            parameter.copy_(source)
    tokens, _ = batch()
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_drawn_weights_do_not_depend_on_the_others() -> None:
    small, large = build(SMALL), build(EVERYTHING.model_copy(update={"layers": 2}))
    shared = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, shared[name]), name
    one_more = dict(build(SMALL.model_copy(update={"layers": 3})).named_parameters())
    assert torch.equal(one_more["layers.1.attention.q.weight"], shared["layers.1.attention.q.weight"])


def test_drawn_weights_differ_by_seed_and_name() -> None:
    drawn = {
        (name, seed): initial_weight(SMALL, name, (16, 16), seed)
        for name in ("layers.0.attention.q.weight", "layers.1.attention.q.weight", "embed.weight")
        for seed in (0, 1, 2**63)
    }
    flat = [tuple(t.flatten().tolist()) for t in drawn.values()]
    assert len(set(flat)) == len(drawn)


def test_drawn_weights_have_the_right_size() -> None:
    wide = Model(vocab_size=64, layers=8, dim=256, init_std=0.05)
    for name, std in {"mlp.up": 0.05, "attention.o": 0.05 / 4, "mlp.down": 0.05 / 4}.items():
        drawn = initial_weight(wide, f"layers.3.{name}.weight", (256, 256), seed=5)
        assert drawn.std().item() == pytest.approx(std, rel=0.02)
        assert drawn.mean().item() == pytest.approx(0, abs=4 * std / 256)
    decoder = build(EVERYTHING)
    assert all((p == 1).all() for name, p in decoder.named_parameters() if "norm" in name)
    assert all((p == 0).all() for name, p in decoder.named_parameters() if name.endswith("bias"))


def test_a_fresh_model_knows_nothing() -> None:
    """The loss of small random weights is that of a uniform guess."""
    tokens, labels = batch(rows=4, length=32)
    loss = build(SMALL)(tokens, labels).item() / labels.numel()
    assert loss == pytest.approx(math.log(97), rel=0.02)


def test_norm_statistics_are_float32() -> None:
    norm = RMSNorm(4096, 1e-5).bfloat16()
    x = (torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)) * 3 + 1).bfloat16()
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    # Half a unit in the last place of bfloat16: only the result is rounded, not the sums.
    assert ((norm(x).double() - exact).abs() <= exact.abs() * 2**-8).all()


@no_bfloat16_cpu
@pytest.mark.parametrize("model", [SMALL, EVERYTHING], ids=["plain", "everything"])
def test_autocast_keeps_the_loss_and_gradients_in_float32(model: Model) -> None:
    tokens, labels = batch()
    exact, cast = build(model), build(model)
    expected = exact(tokens, labels)
    expected.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cast(tokens, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0)
    for name, want in gradients(exact).items():
        got = gradients(cast)[name]
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 0.05 * want.norm() + 1e-4, name


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    plain, saving = build(EVERYTHING), build(EVERYTHING)
    for i, block in enumerate(saving.layers):
        saving.layers[i] = checkpoint_wrapper(block)
    plain(*batch()).backward()
    saving(*batch()).backward()
    checkpointed = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(saving).items()}
    assert all(torch.equal(grad, checkpointed[name]) for name, grad in gradients(plain).items())


@pytest.fixture
def mesh(tmp_path_factory: pytest.TempPathFactory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(decoder: Decoder, mesh: object, **policy: object) -> Decoder:
    for block in decoder.layers:
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(decoder, mesh=mesh, **policy)


@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_equals_plain(mesh: object, reshard: bool) -> None:
    plain, sharded = build(EVERYTHING), shard(build(EVERYTHING), mesh, reshard_after_forward=reshard)
    losses = []
    for decoder in (plain, sharded):
        loss = decoder(*batch())
        (loss / 26).backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for name, grad in gradients(sharded).items():
        assert torch.equal(grad.full_tensor(), gradients(plain)[name]), name


@no_bfloat16_cpu
def test_mixed_precision_leaves_positions_exact(mesh: object) -> None:
    plain = build(SMALL)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = shard(build(SMALL), mesh, mp_policy=policy)
    seen: list[Tensor] = []
    sharded.layers[1].attention.register_forward_pre_hook(lambda _, args: seen.append(args[1].tables[0]))
    expected, loss = plain(*batch()), sharded(*batch())
    (loss / 26).backward()
    assert torch.equal(seen[0], rotary_table(torch.arange(13), SMALL.head_dim, 10_000.0))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0)
    assert all(grad.dtype == torch.float32 for grad in gradients(sharded).values())


def test_a_decoder_can_be_planned_on_the_meta_device_and_filled_later() -> None:
    """What a sharded start does: shapes first, memory later, weights last."""
    later = empty_decoder(EVERYTHING, device="meta").to_empty(device="cpu")
    init_weights(later, seed=0)
    now = build(EVERYTHING)
    assert torch.equal(later(batch()[0]), now(batch()[0]))


def test_vocab_size_must_be_resolved() -> None:
    with pytest.raises(AssertionError, match="vocab_size is resolved"):
        empty_decoder(Model())


@pytest.mark.gpu
@pytest.mark.parametrize("model", [SMALL, EVERYTHING], ids=["plain", "everything"])
def test_a_gpu_gives_the_same_loss_and_gradients(model: Model) -> None:
    here, there = build(model), build(model).cuda()
    tokens, labels = batch()
    labels[0, :3] = -100
    losses = here(tokens, labels), there(tokens.cuda(), labels.cuda())
    for loss in losses:
        (loss / 23).backward()
    torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-5, atol=1e-4)
    for name, want in gradients(here).items():
        torch.testing.assert_close(gradients(there)[name].cpu(), want, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.gpu
def test_a_gpu_repeats_itself_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        seen = []
        for _ in range(2):
            decoder = build(EVERYTHING).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = decoder(*(t.cuda() for t in batch(rows=8, length=64)))
            loss.backward()
            seen.append([loss.detach(), *gradients(decoder).values()])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns itself, about itself
def test_compiled_blocks_give_the_same_gradients() -> None:
    plain, compiled = build(EVERYTHING), build(EVERYTHING)
    for block in compiled.layers:
        block.compile(fullgraph=True)
    torch._dynamo.reset()
    plain(*batch()).backward()
    compiled(*batch()).backward()
    for name, want in gradients(plain).items():
        torch.testing.assert_close(gradients(compiled)[name], want, rtol=1e-4, atol=1e-6, msg=name)
