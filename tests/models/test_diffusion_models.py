"""Diffusion transformers equal those of diffusers, in folders both ways; conditions, sizes and first weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headway.agent.launch.resolve import resolve_model
from headway.errors import ModelError
from headway.models import init_weights, load_into, write_folder
from headway.models.diffusion import Conditioning, TextStates, dropped, empty_transformer, null_conditioning
from headway.plan.diffusion import attention_flops, matmul_flops
from headway.plan.flops import parameters
from headway.recipe.families import class_of
from headway.recipe.families.dit import DiT
from headway.recipe.families.wan import Wan
from headway.recipe.huggingface import read_model
from lazy_imports import diffusers

TEXT = 512
"""The tokens that diffusers' image-to-video takes for text, whatever there are."""
SIZES = {
    "num_attention_heads": 2, "attention_head_dim": 14, "text_dim": 10, "freq_dim": 16, "ffn_dim": 40, "num_layers": 2,
    "out_channels": 4,
}  # fmt: skip
WANS: dict[str, dict[str, Any]] = {
    "text to video": {"in_channels": 4},
    "image to video": {"in_channels": 9, "image_dim": 6, "added_kv_proj_dim": 28},
    "first and last frame": {"in_channels": 9, "image_dim": 6, "added_kv_proj_dim": 28, "pos_embed_seq_len": 6},
    "image channels, 3D patches": {"in_channels": 9, "patch_size": (2, 1, 2), "cross_attn_norm": False, "eps": 1e-4},
}


def randomize(model: nn.Module) -> nn.Module:
    """No parameter is zero or one, so that every one counts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model.eval()


def wan(case: str) -> nn.Module:
    return randomize(diffusers.WanTransformer3DModel(**SIZES, **WANS[case]))


def wan_inputs(case: str) -> tuple[Tensor, Tensor, Conditioning]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    more, settings = WANS[case]["in_channels"] - 4, WANS[case]
    text = TextStates(random(2, TEXT, 10), torch.ones(2, TEXT, dtype=torch.bool))
    images = settings.get("pos_embed_seq_len", 5) if "image_dim" in settings else 0
    conditioning = Conditioning(
        text=text,
        image_BIE=random(2, images, 6) if images else None,
        latents_BCTYX=random(2, more, 4, 4, 6) if more else None,
    )
    return random(2, 4, 4, 4, 6), torch.tensor([0.037, 0.9]), conditioning


def run_wan(theirs: nn.Module, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
    image = conditioning.image_BIE
    if image is not None and theirs.config.pos_embed_seq_len is not None:
        image = image.view(2 * len(image), -1, image.shape[2])  # two images per sample
    extra = conditioning.latents_BCTYX
    inputs = x if extra is None else torch.cat((x, extra), dim=1)
    out: Tensor = theirs(inputs, t * 1000, conditioning.text.states_BSE, image).sample
    return out


def dit() -> nn.Module:
    """Its blocks have equal embeddings of time and class, as those of the published model."""
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, out_channels=6, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    randomize(theirs)
    first, *others = theirs.transformer_blocks
    for block in others:
        block.norm1.emb.load_state_dict(first.norm1.emb.state_dict())
    return theirs


def gradient_differences(ours: nn.Module, theirs: nn.Module) -> dict[str, float]:
    """The norm of the difference of every gradient over the norm of the gradient, by name.

    One that is zero up to rounding (of a key's bias, which no softmax sees) is compared with a thousandth of all.
    """
    wanted, sums = dict(theirs.named_parameters()), dict[str, Tensor]()
    for form in ours.model.hf_tensors():  # one that diffusers has copies of has the sum of their gradients
        (name,) = form.headway_names
        sums[name] = sums.get(name, 0) + wanted[form.name].grad
    assert sums.keys() == dict(ours.named_parameters()).keys()
    least = torch.stack([gradient.norm() for gradient in sums.values()]).norm() / 1000
    return {
        name: float((ours.get_parameter(name).grad - want).norm() / torch.maximum(want.norm(), least))
        for name, want in sums.items()
    }


def compared(case: str, folder: Path) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Both models with the weights of one folder, and what they compute, after a backward pass."""
    theirs = dit() if case == "dit" else wan(case)
    theirs.save_pretrained(folder)
    ours = empty_transformer(read_model(folder))
    load_into(ours, folder)
    if case == "dit":
        x, labels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([7, 10])
        t = torch.tensor([0.25, 0.7])
        want = theirs(x, t * 1000, labels).sample.unsqueeze(2)
        got = ours.outputs(x.unsqueeze(2), t, Conditioning(labels))
        assert torch.equal(ours(x.unsqueeze(2), t, Conditioning(labels)), got[:, :3])
    else:
        inputs = wan_inputs(case)
        got, want = ours(*inputs), run_wan(theirs, *inputs)
    for out in (got, want):
        (out - 0.5).square().mean().backward()
    return ours, theirs, got.detach(), want.detach()


@pytest.mark.parametrize("case", [*WANS, "dit"])
def test_transformer_equals_diffusers(case: str, tmp_path: Path) -> None:
    ours, theirs, got, want = compared(case, tmp_path)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4
    for name, difference in gradient_differences(ours, theirs).items():
        assert difference <= 1e-3, name


def opened(folder: Path, kind: type) -> nn.Module:
    """What diffusers makes of a folder; without `accelerate`, its from_pretrained refuses models like Wan."""
    if kind is diffusers.DiTTransformer2DModel:
        model, unused = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(unused.values()), unused
        return model
    model = kind.from_config(kind.load_config(folder))
    weights = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("shard_bytes", [2**30, 20_000], ids=["one file", "sharded"])
@pytest.mark.parametrize("make", [lambda: wan("first and last frame"), dit], ids=["wan", "dit"])
def test_written_folders_are_those_of_diffusers(make: Any, shard_bytes: int, tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    section = read_model(tmp_path / "theirs")
    ours = empty_transformer(section)
    load_into(ours, tmp_path / "theirs")
    write_folder(tmp_path / "ours", section, ours.state_dict(), shard_bytes=shard_bytes)
    index = tmp_path / "ours" / "diffusion_pytorch_model.safetensors.index.json"
    assert index.exists() == (shard_bytes < 2**30)
    assert read_model(tmp_path / "ours") == section
    again = opened(tmp_path / "ours", type(theirs))
    written, stored = (json.loads((tmp_path / side / "config.json").read_bytes()) for side in ("ours", "theirs"))
    assert written == {key: value for key, value in stored.items() if key == "_class_name" or key[0] != "_"}
    stored = theirs.state_dict()
    assert stored.keys() == again.state_dict().keys()
    assert all(torch.equal(value, stored[name]) for name, value in again.state_dict().items())


def test_dit_whose_blocks_were_trained_apart_is_refused(tmp_path: Path) -> None:
    theirs = diffusers.DiTTransformer2DModel(num_attention_heads=1, attention_head_dim=8, num_layers=2, sample_size=4)
    randomize(theirs).save_pretrained(tmp_path / "theirs")
    ours = empty_transformer(read_model(tmp_path / "theirs"))
    with pytest.raises(ModelError, match=r"transformer_blocks.0.norm1.emb.* and transformer_blocks.1.norm1.* differ"):
        load_into(ours, tmp_path / "theirs")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"qk_norm": "layer_norm"}, "qk_norm"),
        ({"out_channels": 32}, "out_channels"),
        ({"image_dim": 8}, "added_kv_proj_dim"),
        ({"attention_head_dim": 5}, "head_dim"),
    ],
)
def test_wan_folders_that_cannot_be_reproduced_are_refused(change: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    config = {"_class_name": "WanTransformer3DModel", **SIZES, "in_channels": 4} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=wrong):
        read_model(tmp_path)


# -- conditions


def test_dropped_conditions_are_null_and_others_stay() -> None:
    section = DiT(num_classes=10)
    labels = dropped(Conditioning(torch.tensor([1, 2])), null_conditioning(section), torch.tensor([True, False]))
    assert labels.labels_B.tolist() == [10, 2]
    text = TextStates(torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    empty = TextStates(torch.zeros(1, 3, 4), torch.tensor([[True, False, False]]))
    image = torch.randn(2, 5, 6)
    null = null_conditioning(DiT(conditioning="text", text_dim=4, text_tokens=3), empty)
    states = dropped(Conditioning(text=text, image_BIE=image), null, torch.tensor([False, True]))
    assert torch.equal(states.text.states_BSE[0], text.states_BSE[0])
    assert not states.text.states_BSE[1].any()
    assert states.text.mask_BS.tolist() == [[True] * 3, [True, False, False]]
    assert states.image_BIE is image


def test_text_dit_does_not_attend_to_padding() -> None:
    section = DiT(conditioning="text", text_dim=4, text_tokens=3, layers=1, dim=16, heads=2, in_channels=1)
    model = randomize(empty_transformer(section))
    x, t, states = torch.randn(2, 1, 1, 4, 6), torch.tensor([0.1, 0.8]), torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = model(x, t, Conditioning(text=TextStates(states, mask)))
    changed = states.masked_fill(~mask.unsqueeze(2), 5.0)
    assert torch.equal(model(x, t, Conditioning(text=TextStates(changed, mask))), out)
    assert not torch.equal(model(x, t, Conditioning(text=TextStates(-states, mask))), out)


CLASS_1 = Conditioning(torch.tensor([1]))


@pytest.mark.parametrize(
    ("x", "conditioning", "wrong"),
    [
        ((1, 4, 1, 6, 5), CLASS_1, "1 x 6 x 5 .* not divisible into patches of 1 x 2 x 2: width 5"),
        ((1, 4, 3, 6, 6), CLASS_1, "3 frames; dit takes images"),
        ((1, 3, 1, 6, 6), CLASS_1, "3 channels; this dit takes 4"),
        ((1, 4, 1, 6, 6), Conditioning(), "conditioned on a class"),
    ],
)  # fmt: skip
def test_samples_that_a_model_does_not_take_are_named(x: tuple[int, ...], conditioning: Any, wrong: str) -> None:
    model = empty_transformer(DiT(num_classes=3, dim=16, heads=2, layers=1))
    with pytest.raises(ModelError, match=wrong) as error:
        model(torch.zeros(x), torch.zeros(1), conditioning)
    if "patches" in wrong:
        assert error.value.hint == "nearest that work: 4 or 6"


def test_positions_of_interpolated_images_span_those_of_the_base() -> None:
    from headway.models.diffusion.dit import image_positions

    whole, half = (
        image_positions((8, 8), 32, 4, torch.device("cpu")),
        image_positions((4, 4), 32, 4, torch.device("cpu")),
    )
    assert torch.allclose(whole.view(8, 8, 32)[::2, ::2], half.view(4, 4, 32))
    assert torch.equal(half, image_positions((4, 4), 32, None, torch.device("cpu")))


# -- first weights and costs


@pytest.mark.parametrize("section", [
    DiT(num_classes=3, dim=32, heads=2, layers=2), DiT(conditioning="text", dim=32, heads=2, layers=2),
])  # fmt: skip
def test_first_dit_is_the_identity_in_every_block_and_predicts_zero(section: DiT) -> None:
    model = empty_transformer(section)
    init_weights(model, seed=3)
    text = TextStates(torch.randn(1, 4, 64), torch.ones(1, 4, dtype=torch.bool))
    labels = torch.tensor([1]) if section.conditioning == "class" else None
    conditioning = Conditioning(labels, text if labels is None else None)
    seen = []
    model.layers[-1].register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out)))
    out = model(torch.randn(1, 4, 1, 4, 4), torch.tensor([0.5]), conditioning)
    assert not out.any()
    assert torch.equal(*seen[0])
    assert seen[0][0].std() > 0.3


SECTIONS = {
    "dit": DiT(num_classes=3, dim=32, heads=2, layers=2, learned_variance=True),
    "text dit": DiT(conditioning="text", dim=32, heads=2, layers=3, text_tokens=5),
    "wan": Wan(dim=32, heads=2, layers=2, in_channels=4, text_dim=6, text_tokens=5),
    "image to video": Wan(
        dim=32, heads=2, layers=2, in_channels=4, text_dim=6, text_tokens=5, image_channels=5, image_dim=10,
        image_positions=7, cross_norm=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
def test_parameters_and_flops_are_those_of_the_module(name: str) -> None:
    section = SECTIONS[name]
    arch, model = section.architecture(), empty_transformer(section)
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert shapes == section.tensors()
    assert list(shapes) == list(section.tensors())
    assert parameters(arch) == sum(map(math.prod, shapes.values()))

    init_weights(model, 0)
    video = section.family == "wan"
    x = torch.randn(2, 4, 3 if video else 1, 4, 6)
    tokens = section.tokens(*x.shape[2:])
    text = TextStates(torch.randn(2, 5, section.text_dim or 1), torch.ones(2, 5, dtype=torch.bool))
    image = torch.randn(2, 7, 10) if name == "image to video" else None
    extra = torch.randn(2, 5, 3, 4, 6) if name == "image to video" else None
    labels = torch.tensor([0, 1]) if section.conditioning == "class" else None
    conditioning = Conditioning(labels, None if labels is not None else text, image, extra)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(x, torch.rand(2), conditioning)
    assert counter.get_total_flops() == 2 * (matmul_flops(arch, tokens) + attention_flops(arch, tokens))


def test_published_sizes() -> None:
    xl = DiT(layers=28, dim=1152, heads=16, patch=2, num_classes=1000, learned_variance=True)
    assert parameters(xl.architecture()) == 674_834_720  # 675 M in the paper, with fixed positions counted or not
    small = Wan(layers=30, dim=1536, heads=12, hidden=8960, text_dim=4096, text_encoder="somewhere")
    assert parameters(small.architecture()) == 1_418_996_800  # of Wan2.1-T2V-1.3B


# -- files of adapters are in test_lora_diffusion.py


def test_stored_weights_have_their_bits(tmp_path: Path) -> None:
    theirs = wan("text to video").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    section = read_model(tmp_path / "theirs")
    ours = empty_transformer(section).to(torch.bfloat16)
    load_into(ours, tmp_path / "theirs")
    write_folder(tmp_path / "ours", section, ours.state_dict())
    names = [tmp_path / side / "diffusion_pytorch_model.safetensors" for side in ("theirs", "ours")]
    first, second = map(load_file, names)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].view(torch.int16), second[name].view(torch.int16)) for name in first)


# -- precision and compilation


def sample_of(name: str) -> tuple[Tensor, Tensor, Conditioning]:
    section, generator = SECTIONS[name], torch.Generator().manual_seed(2)
    x = torch.randn(2, 4, 3 if section.family == "wan" else 1, 4, 6, generator=generator)
    if section.conditioning == "class":
        return x, torch.tensor([0.2, 0.9]), Conditioning(torch.tensor([0, 3]))
    text = TextStates(torch.randn(2, 5, section.text_dim, generator=generator), torch.ones(2, 5, dtype=torch.bool))
    images = name == "image to video"
    image = torch.randn(2, 7, 10, generator=generator) if images else None
    extra = torch.randn(2, 5, 3, 4, 6, generator=generator) if images else None
    return x, torch.tensor([0.2, 0.9]), Conditioning(None, text, image, extra)


@pytest.mark.parametrize("way", ["autocast", "weights"])
@pytest.mark.parametrize("name", SECTIONS)
def test_bfloat16_is_close_and_predictions_keep_the_precision_of_samples(name: str, way: str) -> None:
    model = randomize(empty_transformer(SECTIONS[name]))
    inputs = sample_of(name)
    with torch.no_grad():
        want = model(*inputs)
        if way == "weights":
            model = model.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
            got = model(*inputs)
    assert got.dtype == want.dtype == torch.float32
    assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns itself, about itself
@pytest.mark.parametrize("name", SECTIONS)
def test_blocks_compile_into_one_graph_each(name: str) -> None:
    inputs, results = sample_of(name), []
    for compiles in (False, True):
        model = randomize(empty_transformer(SECTIONS[name]))
        for block in model.layers if compiles else ():
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        out = model(*inputs)
        out.square().mean().backward()
        results.append([out.detach(), *(parameter.grad for parameter in model.parameters())])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-4)


# -- starting from a folder


def test_a_recipe_takes_its_shape_from_a_folder_and_states_the_text_encoder(tmp_path: Path) -> None:
    wan("text to video").save_pretrained(tmp_path / "wan")
    stated = Wan(init=str(tmp_path / "wan"), text_encoder="umt5", text_tokens=77)
    shaped = resolve_model(stated, tmp_path)
    assert shaped.tensors() == read_model(tmp_path / "wan").tensors()
    assert (shaped.text_encoder, shaped.text_tokens, shaped.text_dim) == ("umt5", 77, 10)
    with pytest.raises(ModelError, match=r"model\.layers is 3 in the recipe and 2 in"):
        resolve_model(Wan(init=str(tmp_path / "wan"), layers=3), tmp_path)
    dit().save_pretrained(tmp_path / "dit")
    assert resolve_model(DiT(init=str(tmp_path / "dit")), tmp_path).num_classes == 10


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"family": "dit"}, "needs num_classes"),
        ({"family": "dit", "num_classes": 2, "vocab_size": 64}, "model.vocab_size does not apply to dit"),
        ({"family": "wan", "num_classes": 2}, "model.num_classes does not apply to wan"),
        ({"family": "dit", "num_classes": 2, "text_tokens": 9}, 'no effect with conditioning = "class"'),
        ({"family": "dit", "num_classes": 2, "dim": 100, "heads": 3}, "must equal dim"),
    ],
)
def test_recipes_that_make_no_sense_say_why(values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        class_of(values)(**values)


def test_sections_survive_files() -> None:
    for section in SECTIONS.values():
        values = section.model_dump(mode="json")
        assert class_of(values)(**values) == section
        assert not section.ABSENT & values.keys()
