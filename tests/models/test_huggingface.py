"""Weights in and out against `transformers`: the same logits and the same loss from the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from typer.testing import CliRunner

from headway.agent import resume_run
from headway.agent.launch.resolve import resolve_model
from headway.cli.checkpoint import app
from headway.errors import ModelError, RunError
from headway.inference.sample import SampleRequest, sample
from headway.models import Decoder, empty_decoder, init_weights, load_into, read_weights, write_folder
from headway.recipe import Model
from headway.recipe.huggingface import read_model
from headway.state.tensors import load_weights
from headway.track import RunFolder, create_run
from lazy_imports import transformers

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TEXT = "def headway(x):\n    return x + 1  # Zeit läuft\n"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-full-heads": ("Llama", {"num_key_value_heads": 6, "head_dim": 16}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-wide-window": ("Mistral", {"sliding_window": 256, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biased": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


def make(name: str, folder: Path, **save: Any) -> Any:
    """A random model of a family, every tensor of it random (fresh norms and biases would hide mistakes)."""
    family, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | settings)
    hf_model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    hf_model.save_pretrained(folder, **save)
    return hf_model


def load(folder: Path) -> Decoder:
    decoder = empty_decoder(read_model(folder))
    load_into(decoder, folder)
    return decoder


def tokens(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(131, (rows, length), generator=torch.Generator().manual_seed(3))


def equal(actual: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.5  # else equality would say little
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_loss_equal_transformers(name: str, tmp_path: Path) -> None:
    hf_model = make(name, tmp_path)
    decoder = load(tmp_path)
    ids = tokens()
    following = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)
    following[1, :10] = -100
    labels = ids.clone()
    labels[1, 1:11] = -100  # `transformers` shifts labels itself
    with torch.no_grad():
        expected = hf_model(ids, labels=labels)
        equal(decoder(ids), expected.logits)
        mean = decoder(ids, following) / (following != -100).sum()
    torch.testing.assert_close(mean, expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_written_folder(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "theirs")
    decoder = load(tmp_path / "theirs")
    write_folder(tmp_path / "ours", decoder.model, dict(decoder.named_parameters()), seq=256)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.max_position_embeddings == 256
    with torch.no_grad():
        equal(decoder(tokens()), again(tokens()).logits)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_sharded_folder_of_transformers_is_read(tmp_path: Path) -> None:
    hf_model = make("llama", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.no_grad():
        equal(load(tmp_path)(tokens()), hf_model(tokens()).logits)


def test_sharded_folder_is_written(tmp_path: Path) -> None:
    decoder = fresh()
    write_folder(tmp_path / "out", decoder.model, dict(decoder.named_parameters()), shard_bytes=40_000)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 45_000
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens()), again(tokens()).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(decoder(tokens()), load(tmp_path / "out")(tokens()))


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    decoder = fresh().bfloat16()
    write_folder(tmp_path / "out", decoder.model, decoder.state_dict())
    assert {t.dtype for t in read_weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    for name, tensor in load(tmp_path / "out").state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, decoder.state_dict()[name].float())


def train_tokenizer(path: Path) -> Tokenizer:
    """A byte-level tokenizer of 262 tokens at most, written as a tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=131 * 2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_tokenizer_comes_along(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    decoder = fresh()
    write_folder(tmp_path / "out", decoder.model, decoder.state_dict(), tmp_path / "tokenizer.json", seq=64)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids
    assert again.decode(tokenizer.encode(TEXT).ids) == TEXT
    assert again.model_max_length == 64
    assert again.eos_token == "<|endoftext|>"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>")


def checkpoint_verb(*args: str | Path, runs: Path) -> None:
    result = CliRunner().invoke(app, [*map(str, args), "--runs", str(runs)])
    assert result.exception is None, result.exception


def imported(tmp_path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Tokenizer]:
    """A model of `transformers` with a tokenizer in tmp_path/theirs, and the run `m` that was made of it."""
    (tmp_path / "theirs").mkdir()
    tokenizer = train_tokenizer(tmp_path / "theirs/tokenizer.json")
    end = tokenizer.token_to_id("<|endoftext|>")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE | {"vocab_size": 262, "head_dim": 16, "eos_token_id": [end, 7]})
    hf_model = transformers.Qwen3ForCausalLM(config).eval().to(dtype)
    hf_model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    checkpoint_verb("import", tmp_path / "theirs", "--name", "m", runs=tmp_path / "runs")
    return hf_model, tokenizer


def test_an_imported_run_says_what_transformers_says(tmp_path: Path) -> None:
    hf_model, tokenizer = imported(tmp_path)
    prompt = tokenizer.encode("def head")
    with torch.no_grad():
        ids = torch.tensor([prompt.ids])
        expected = hf_model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
    run = tmp_path / "runs/m"
    request = SampleRequest(
        run=run, checkpoint=run / "checkpoints/step-00000000", prompts=["def head"], max_tokens=12, temperature=0
    )
    text = "".join(piece["text"] for piece in sample(request))
    assert "def head" + text == tokenizer.decode(expected[0].tolist(), skip_special_tokens=False)


def test_what_was_imported_goes_out_to_transformers_again(tmp_path: Path) -> None:
    hf_model, tokenizer = imported(tmp_path, torch.bfloat16)
    checkpoint_verb("export", "m", tmp_path / "out", runs=tmp_path / "runs")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.bfloat16
    assert again.config.max_position_embeddings == 256
    assert again.config.eos_token_id == hf_model.config.eos_token_id
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in hf_model.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recipe_starts_from_what_was_imported(tmp_path: Path, dtype: torch.dtype) -> None:
    imported(tmp_path, dtype)
    # As training takes it over: exactly, in the precision of its own weights.
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    model = resolve_model(Model(init="m"), tmp_path / "runs")
    assert model.init == str(tmp_path / "runs/m/checkpoints/step-00000000")
    decoder = empty_decoder(model)
    load_weights(Path(model.init), decoder)
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens()), hf_model(tokens()).logits, rtol=1e-4, atol=1e-4)


def test_a_recipe_does_not_start_from_the_path_of_a_runs_folder(tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs", "m", "m")
    run.recipe_file.write_text("{}")
    with pytest.raises(ModelError, match="is the path of a run's folder") as raised:
        resolve_model(Model(init=str(run.path)), tmp_path / "runs")
    assert raised.value.hint == "give the run's name, m, with --runs or HEADWAY_RUNS if it lies elsewhere"


def test_an_imported_run_cannot_be_resumed(tmp_path: Path) -> None:
    imported(tmp_path)
    with pytest.raises(RunError, match=r"run m was imported"):
        resume_run(RunFolder(tmp_path / "runs/m"), [])


def fresh(**changes: Any) -> Decoder:
    decoder = empty_decoder(Model(vocab_size=131, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, **changes))
    init_weights(decoder, seed=0)
    return decoder


def folder_of(decoder: Decoder, path: Path) -> Path:
    write_folder(path, decoder.model, dict(decoder.named_parameters()))
    return path


def edit(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def refused(folder: Path, *words: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_weights(folder)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    edit(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, "lacks", "layers.1.mlp.up_proj.weight")


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    edit(folder, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    refused(folder, "model.layers.0.self_attn.q_proj.bias", "does not have")


def test_another_shape_is_named(tmp_path: Path) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    edit(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(33)}))
    refused(folder, "norm.weight", "(33,)", "(32,)")


def test_a_decoder_of_another_shape_is_left_alone(tmp_path: Path) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    other = empty_decoder(Model(vocab_size=131, layers=2, dim=32, heads=4, kv_heads=4, hidden=48))
    init_weights(other, seed=1)
    before = {name: p.clone() for name, p in other.named_parameters()}
    with pytest.raises(ModelError, match=r"layers.0.self_attn.k_proj.weight of shape \(16, 32\)"):
        load_into(other, folder)
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


def test_derived_and_tied_tensors_are_passed_over(tmp_path: Path) -> None:
    decoder = fresh()
    folder = folder_of(decoder, tmp_path / "f")
    derived = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.zeros(131, 32),
    }
    edit(folder, lambda weights: weights.update(derived))
    assert sorted(read_weights(folder)) == sorted(decoder.model.tensors())


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in (refused(folder, "pickled").hint or "")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:100], whole[:-4], b"\xff" * 8 + whole[8:]):
        (folder / "model.safetensors").write_bytes(damaged)
        refused(folder, "model.safetensors", "cannot read")
    (folder / "model.safetensors").unlink()
    refused(folder, "has no model.safetensors")
    (folder / "config.json").unlink()
    refused(folder, "config.json", "cannot read")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, ["gone.safetensors", "missing"]),
        ({"weight_map": {"model.norm.weight": "../f/model.safetensors"}}, ["not a file of its folder"]),
        ({"weight_map": {"model.norm.weight": 3}}, ["index.json"]),
        ({"weight_map": [1]}, ["not a safetensors index"]),
        ([], ["not a safetensors index"]),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, index: Any, words: list[str]) -> None:
    folder = folder_of(fresh(), tmp_path / "f")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, *words)


def test_writing_never_overwrites_or_leaves_half(tmp_path: Path) -> None:
    decoder = fresh()
    folder = folder_of(decoder, tmp_path / "deep/f")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ModelError, match="already exists"):
        folder_of(fresh(qk_norm=True), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(ModelError, match="cannot be written"):
        write_folder(tmp_path / "g", decoder.model, decoder.state_dict(), tokenizer=tmp_path / "none.json")
    tensors = decoder.state_dict()
    del tensors["norm.weight"]
    with pytest.raises(ModelError, match=r"lacks norm\.weight"):
        write_folder(tmp_path / "h", decoder.model, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
