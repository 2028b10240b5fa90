"""Text encoders equal those of transformers, and say what they cannot take."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway.errors import ModelError
from headway.models.diffusion import open_text_encoder
from headway.models.diffusion.text_encoders import read_text_encoder
from headway.recipe.families.dit import DiT
from lazy_imports import transformers

VOCABULARY, TOKENS = 40, 24
T5_SIZES = {
    "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "vocab_size": VOCABULARY,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip


def t5() -> torch.nn.Module:
    return transformers.T5EncoderModel(transformers.T5Config(**T5_SIZES, feed_forward_proj="relu"))


def gated_t5() -> torch.nn.Module:
    return transformers.T5EncoderModel(transformers.T5Config(**T5_SIZES, feed_forward_proj="gated-gelu"))


def umt5() -> torch.nn.Module:
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**T5_SIZES))


def clip() -> torch.nn.Module:
    config = transformers.CLIPTextConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.CLIPTextModel(config)


@pytest.mark.parametrize("make", [t5, gated_t5, umt5, clip], ids=lambda make: make.__name__)
def test_text_encoder_equals_transformers(make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = make().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "encoder")
    ours, width, _ = read_text_encoder(tmp_path / "encoder")
    ids = torch.randint(3, VOCABULARY, (3, TOKENS))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [5], [1]])
    with torch.no_grad():
        want = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        got = ours(ids, mask)
    assert width == want.shape[-1]
    assert (got - want)[mask].abs().max() < 1e-4


def words(folder: Path) -> None:
    """A tokenizer of single words that ends every text with </s>, as T5's."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "cat": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_prompts_are_encoded_with_the_tokenizer_beside_the_encoder(tmp_path: Path) -> None:
    theirs = umt5().eval()
    theirs.save_pretrained(tmp_path / "text_encoder")
    words(tmp_path / "tokenizer")
    section = DiT(conditioning="text", text_encoder=str(tmp_path / "text_encoder"), text_dim=16, text_tokens=5)
    states, mask = open_text_encoder(section).encode(["a cat", ""])
    assert mask.tolist() == [[True, True, True, False, False], [True, False, False, False, False]]
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor([[3, 4, 1]])).last_hidden_state
    assert (states[0, :3] - want[0]).abs().max() < 1e-4
    assert not states[0, 3:].any()


def test_a_text_encoder_names_what_does_not_fit(tmp_path: Path) -> None:
    clip().save_pretrained(tmp_path / "text_encoder")
    words(tmp_path / "tokenizer")
    section = DiT(conditioning="text", text_encoder=str(tmp_path / "text_encoder"), text_tokens=4)
    with pytest.raises(ModelError, match=r"text_dim is 64, but .* has states of width 16"):
        open_text_encoder(section)
    with pytest.raises(ModelError, match=r"text_tokens is 25, but .* has positions for 24"):
        open_text_encoder(section.model_copy(update={"text_tokens": TOKENS + 1}))
    encoder = open_text_encoder(section.model_copy(update={"text_dim": 16}))
    with pytest.raises(ModelError, match="prompt 2 has 5 tokens; the text encoder takes 4"):
        encoder.encode(["a cat", "a cat a cat"])


def test_the_byte_encoder_tells_prompts_apart_and_depends_on_nothing_else() -> None:
    section = DiT(conditioning="text", text_tokens=32)
    first, again = open_text_encoder(section), open_text_encoder(section)
    prompts = ["a square moves left", "a square moves right", ""]
    states, mask = first.encode(prompts)
    alone, _ = again.encode(prompts[1:2])
    assert states.shape == (3, 32, 64)
    assert mask.sum(dim=1).tolist() == [20, 21, 1]
    assert (states[1] - alone[0]).abs().max() < 1e-5  # whatever is beside it
    assert (states[0, :14] - states[1, :14]).abs().max() > 0.01  # also where the bytes are the same
    with pytest.raises(ModelError, match="prompt 1 has 33 tokens; the text encoder takes 32"):
        first.encode(["x" * 32])
