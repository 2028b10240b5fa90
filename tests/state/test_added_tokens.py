"""A longer vocabulary, as transformers reads it."""

import pytest
import torch

from chat_models import CHATML, byte_tokenizer, write_model_folder
from headway.errors import DataError
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import Model
from headway.state.added_tokens import add_tokens
from lazy_imports import transformers

NEW = ["<|think|>", "<|end|>"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_means_and_old_ones_stay(tmp_path, tied, dtype):
    tokenizer = byte_tokenizer()
    size = tokenizer.vocab_size
    model = Model(layers=1, dim=16, heads=2, vocab_size=size, tie_embeddings=tied)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=0)
    write_folder(tmp_path / "base", model, decoder.to(dtype).state_dict())
    write_model_folder(tmp_path / "base", tokenizer, CHATML)
    ids = add_tokens(tmp_path / "base", tmp_path / "more", NEW, "{{ messages }}")
    assert ids == [size, size + 1]
    read_model = transformers.AutoModelForCausalLM.from_pretrained
    before, after = (read_model(tmp_path / name, dtype=torch.float32) for name in ("base", "more"))
    for old, new in (
        (before.get_input_embeddings().weight, after.get_input_embeddings().weight),
        (before.get_output_embeddings().weight, after.get_output_embeddings().weight),
    ):
        assert new.shape == (size + 2, 16)
        assert torch.equal(new[:size], old)
        mean = old.double().mean(dim=0).to(dtype).float()
        torch.testing.assert_close(new[size:], mean.expand(2, -1))
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "more")
    assert read("a<|think|>b", add_special_tokens=False)["input_ids"][1] == size
    assert (tmp_path / "more" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "base" / "chat_template.jinja").read_text() == CHATML


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        add_tokens(tmp_path, tmp_path / "out", ["<a>"])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["<a>", ""], "token 2, '', is empty or white space"),
        ([" "], "token 1, ' ', is empty or white space"),
        (["<a>", "<b>", "<a>"], "the token '<a>' is named twice"),
        (["<a>", "<|im_end|>"], "has the token '<|im_end|>' already: it is 257"),
    ],
)
def test_tokens_that_are_no_new_ones_are_named(tmp_path, tokens, message):
    write_model_folder(tmp_path / "base", byte_tokenizer(), CHATML)
    with pytest.raises(DataError) as caught:
        add_tokens(tmp_path / "base", tmp_path / "out", tokens)
    assert message in caught.value.message
    assert not (tmp_path / "out").exists()
