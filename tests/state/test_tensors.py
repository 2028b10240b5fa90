import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from headway.errors import StateError
from headway.recipe import Train
from headway.state import CheckpointFacts, begin_checkpoint, commit, open_checkpoint, shard_name, write_shard
from headway.state.tensors import (
    ModelShare,
    as_tensor,
    frozen_names,
    load_state,
    load_weights,
    named_state,
    owned_pieces,
    pieces,
    read_tensors,
)
from headway.train.build import build_optimizer

FACTS = CheckpointFacts(cursor=0, chain="", data_version="v")

ADAMW = {
    "plain": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Something of everything: a tied weight, a scalar, buffers that are state and one that is not."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 6, bias=False, dtype=dtype))
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)) * self.gain)


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (2, 5), generator=generator)
        logits = model(tokens).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder, state, step=1):
    begun = begin_checkpoint(folder, step)
    return commit(begun, FACTS, [write_shard(begun.partial, shard_name(0), pieces(state))], workers=1)


def equal(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ADAMW)
def test_a_restored_run_continues_bit_for_bit(tmp_path, kind, dtype):
    torch.manual_seed(0)
    model = Net(dtype)
    optimizer = ADAMW[kind](model.parameters())
    train(model, optimizer, 3)
    path = save(tmp_path, named_state(model, optimizer))
    fresh = Net(dtype)
    fresh_optimizer = ADAMW[kind](fresh.parameters())
    train(fresh, fresh_optimizer, 1, seed=5)  # so that its state is there
    load_state(path, fresh, fresh_optimizer)
    assert equal(named_state(fresh, fresh_optimizer), named_state(model, optimizer))
    for loaded, live in zip(fresh.parameters(), model.parameters(), strict=True):
        restored, own = fresh_optimizer.state[loaded], optimizer.state[live]
        assert {k: (v.dtype, v.device, v.stride()) for k, v in restored.items()} == {
            k: (v.dtype, v.device, v.stride()) for k, v in own.items()
        }
    train(model, optimizer, 3, seed=1)
    train(fresh, fresh_optimizer, 3, seed=1)
    assert equal(named_state(fresh, fresh_optimizer), named_state(model, optimizer))
    load_state(path, model, optimizer)  # into state that is there: back to step 3, in place
    assert equal(
        {name: tensor for name, tensor in named_state(model, optimizer).items() if name.startswith("model/")},
        {f"model/{name}": tensor for name, tensor in read_tensors(path).items()},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_optimizer_takes_a_state_before_its_first_step(tmp_path, dtype):
    """As a run does: what build_optimizer makes has the tensors that torch's own makes in its first step."""
    torch.manual_seed(0)
    model, fresh = Net(dtype), Net(dtype)
    kept = str(dtype).removeprefix("torch.")
    rules = Train(lr=0.1, weight_decay=0.01, beta1=0.8, beta2=0.9, eps=1e-6, dtype=kept, weights=kept, moments=kept)
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], **settings
    )
    train(model, optimizer, 3)
    fresh_optimizer = build_optimizer(fresh, rules)
    load_state(save(tmp_path, named_state(model, optimizer)), fresh, fresh_optimizer)
    assert equal(named_state(fresh, fresh_optimizer), named_state(model, optimizer))
    train(model, optimizer, 2, seed=1)
    train(fresh, fresh_optimizer, 2, seed=1)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}  # rounds by chance
    torch.testing.assert_close(named_state(fresh, fresh_optimizer), named_state(model, optimizer), **near)


class LikeCompiled(nn.Module):
    """What torch.compile makes of a module, as far as names go; importing the real one takes seconds."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


@pytest.mark.parametrize("wrap", [LikeCompiled, pytest.param(torch.compile, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_are_those_of_the_bare_model(tmp_path, wrap):
    model, bare = Net(), Net()
    model.body[0] = checkpoint_wrapper(model.body[0])
    model.body[1] = wrap(checkpoint_wrapper(model.body[1]))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = named_state(model, optimizer)
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert set(state) == {f"model/{name}" for name in bare.state_dict()} - {"model/head.weight"} | {
        f"optimizer/{name}/{key}" for name, _ in bare.named_parameters() for key in keys
    }
    bare_optimizer = build_optimizer(bare, Train())
    load_state(save(tmp_path, state), bare, bare_optimizer)
    assert equal(named_state(bare, bare_optimizer), state)
    assert "model/0.body.0.weight" in named_state(nn.Sequential(wrap(Net())))


def test_every_dtype_and_odd_memory(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "bool": torch.rand(5) > 0.5,
        "uint8": torch.arange(256, dtype=torch.uint8),
        "float16": torch.randn(3, 2).half(),
        "bfloat16": torch.randn(2, 2, 2).bfloat16(),
        "int64": torch.tensor(-(2**62)),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "turned": torch.randn(4, 3).t(),
        "sliced": torch.randn(9)[::2],
        "empty": torch.empty(0, 3),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    path = save(tmp_path, {f"model/{name}": tensor for name, tensor in tensors.items()})
    for name, tensor in read_tensors(path).items():
        assert tensor.dtype == tensors[name].dtype
        assert tensor.shape == tensors[name].shape
        same = tensor.contiguous().flatten().view(torch.uint8), tensors[name].contiguous().flatten().view(torch.uint8)
        assert torch.equal(*same)


def test_loads_into_memory_of_any_order(tmp_path):
    model = nn.Linear(4, 3)
    path = save(tmp_path, named_state(model))
    turned = nn.Linear(4, 3)
    turned.weight = nn.Parameter(torch.empty(4, 3).t())
    load_weights(path, turned)
    assert torch.equal(turned.weight, model.weight)
    assert not turned.weight.is_contiguous()


def test_nothing_is_copied_to_write(tmp_path):
    weight = torch.zeros(8)
    (piece,) = pieces({"w": weight})
    piece.data[3] = np.float32(1).view(np.uint32)
    assert weight[3] == 1


def test_plain_tensors_are_written_by_one_rank_each():
    """All who hold the same part of the model share the work; what has no elements is the first one's."""
    tensors = {name: torch.zeros(size) for name, size in {"a": 5, "b": 40, "c": 5, "d": 30, "e": 0}.items()}
    assert [own.piece.name for own in owned_pieces(tensors)] == ["a", "b", "c", "d", "e"]
    ranks = (3, 5)
    shares = {rank: [own.piece.name for own in owned_pieces(tensors, ModelShare(rank, ranks))] for rank in ranks}
    assert sorted(shares[3] + shares[5]) == ["a", "b", "c", "d", "e"]
    assert "e" in shares[3]
    assert {sum(tensors[name].numel() for name in share) for share in shares.values()} == {40}


def test_parameters_of_another_stage_are_not_written():
    tensors = {name: torch.zeros(3) for name in ("model/embed", "model/own", "optimizer/embed/step")}
    share = ModelShare(borrowed={"head.weight": "embed"})
    assert [own.piece.name for own in owned_pieces(tensors, share)] == ["model/own"]


def test_owned_pieces_are_the_live_tensors():
    weight = torch.zeros(2, 3).t()
    (own,) = owned_pieces({"w": weight})
    own.tensor[1, 0] = 5
    assert weight[1, 0] == 5
    assert (own.piece.name, own.piece.dtype) == ("w", "float32")
    assert (own.piece.shape, own.piece.start, own.piece.local_shape) == ((3, 2), (0, 0), (3, 2))


def test_frozen_weights_are_named():
    model = LikeCompiled(Net())
    assert frozen_names(model) == frozenset()
    model._orig_mod.embed.weight.requires_grad = False
    model._orig_mod.body[0].bias.requires_grad = False
    assert frozen_names(model) == {"model/embed.weight", "model/body.0.bias"}
    assert frozen_names(model) < named_state(model).keys()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_memory_seen_as_a_tensor_is_that_memory(dtype):
    size = dtype.itemsize
    bits = np.zeros((2, 3), f"<u{size}")
    tensor = as_tensor(bits, str(dtype).removeprefix("torch."))
    tensor[1, 2] = 1
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (2, 3))
    assert bits[1, 2] == {torch.bfloat16: 0x3F80, torch.float32: 0x3F800000}.get(dtype, 1)
    assert np.count_nonzero(bits) == 1


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.zeros(2))


def narrower():
    model = Net()
    del model.gain
    return model


def reshaped():
    model = Net()
    model.body[1] = nn.Linear(6, 5, bias=False)
    return model


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (Wider, "has no tensor model/more"),
        (narrower, "has tensor model/gain, which the model does not have"),
        (reshaped, r"tensor model/body.1.weight of shape \[6, 6\], not \[5, 6\]"),
        (lambda: Net(torch.bfloat16), "in float32, not bfloat16"),
    ],
)
def test_another_model_is_refused_by_the_tensor_and_left_alone(tmp_path, other, sentence):
    torch.manual_seed(1)
    saved, live = Net(), other()
    path = save(tmp_path, named_state(saved, build_optimizer(saved, Train())))
    optimizer = build_optimizer(live, Train())
    before = copy.deepcopy(named_state(live, optimizer))
    with pytest.raises(StateError, match=sentence) as error:
        load_state(path, live, optimizer)
    assert error.value.hint
    assert equal(named_state(live, optimizer), before)
    if "bfloat16" not in sentence:
        with pytest.raises(StateError, match=sentence):
            load_weights(path, live)
        assert equal(named_state(live, optimizer), before)


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_weights_alone_load_in_any_precision(tmp_path, monkeypatch, turned):
    """A run may begin in float32 from weights that are stored in bfloat16, and the other way round."""
    monkeypatch.setattr("headway.state.tensors._STAGING_BYTES", 40)
    torch.manual_seed(1)
    for stored, wanted in itertools.permutations([torch.float32, torch.bfloat16, torch.float16], 2):
        saved, live = Net(stored), Net(wanted)
        saved.seen += 5
        if turned:
            live.body[1].weight = nn.Parameter(torch.empty(6, 6, dtype=wanted).t())
        load_weights(save(tmp_path / f"{stored}-{wanted}", named_state(saved)), live)
        assert live.seen.tolist() == [5, 5, 5]
        for (name, mine), expected in zip(live.named_parameters(), saved.parameters(), strict=True):
            assert mine.dtype == wanted
            assert torch.equal(mine, expected.to(wanted)), name


def test_integer_dtypes_are_not_converted(tmp_path):
    saved, live = Net(), Net()
    live.seen = live.seen.float()
    path = save(tmp_path, named_state(saved))
    with pytest.raises(StateError, match="tensor model/seen in int64, not float32"):
        load_weights(path, live)


def test_optimizer_state_that_does_not_fit_is_refused(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    weights_only = save(tmp_path / "weights", named_state(model))
    with pytest.raises(StateError, match=r"has no tensor optimizer/gain/step"):
        load_state(weights_only, model, optimizer)
    load_weights(weights_only, Net())
    both = save(tmp_path / "both", named_state(model, optimizer))
    fresh = Net()
    with pytest.raises(StateError, match=r"optimizer/body\.0\.bias/exp_avg, which the model does not have"):
        load_state(both, fresh, torch.optim.AdamW([fresh.gain]))
    load_weights(both, fresh)
    assert equal(named_state(fresh), named_state(model))


def test_optimizer_state_that_is_no_tensor_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["count"] = 3
    with pytest.raises(StateError, match="count of weight: it is not a tensor"):
        named_state(model, optimizer)


def test_a_dtype_that_cannot_be_saved_is_named():
    with pytest.raises(StateError, match="tensor c has dtype complex64"):
        pieces({"c": torch.zeros(2, dtype=torch.complex64)})


def test_damage_is_refused_while_loading(tmp_path):
    model = Net()
    path = save(tmp_path, named_state(model))
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for read in (lambda: load_weights(path, Net()), lambda: read_tensors(path)):
        with pytest.raises(StateError, match=r"rank-00000\.safetensors is damaged"):
            read()


def test_an_open_checkpoint_serves_too(tmp_path):
    model = Net()
    opened = open_checkpoint(save(tmp_path, named_state(model)))
    fresh = Net()
    load_state(opened, fresh)
    assert equal(named_state(fresh), {f"model/{name}": t for name, t in read_tensors(opened).items()})
    assert read_tensors(opened, prefix="model/body.").keys() == {"0.weight", "0.bias", "1.weight"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_and_the_cpu_save_and_load_each_other(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("headway.state.tensors._STAGING_BYTES", 100)
    torch.manual_seed(0)
    name = str(dtype).removeprefix("torch.")
    train = Train(dtype=name, weights=name, moments=name)
    model = Net(dtype).cuda()
    optimizer = ADAMW["fused"](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path = save(tmp_path / "gpu", named_state(model, optimizer))
    cpu = Net(dtype)
    cpu_optimizer = build_optimizer(cpu, train)
    load_state(path, cpu, cpu_optimizer)
    on_gpu = named_state(model, optimizer)
    assert equal(named_state(cpu, cpu_optimizer), {name: tensor.cpu() for name, tensor in on_gpu.items()})
    again = save(tmp_path / "cpu", named_state(cpu, cpu_optimizer))
    assert open_checkpoint(again).manifest.digest == open_checkpoint(path).manifest.digest
    fresh = Net(dtype).cuda()
    fresh_optimizer = build_optimizer(fresh, train)
    load_state(again, fresh, fresh_optimizer)
    assert equal(named_state(fresh, fresh_optimizer), on_gpu)
    assert all(value.is_cuda for state in fresh_optimizer.state.values() for value in state.values())
