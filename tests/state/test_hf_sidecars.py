"""What a folder holds beside weights: it stays with a run that began there, and goes out with what is exported."""

import json
from pathlib import Path

import pytest

from headway.recipe import Model
from headway.state.hf_sidecars import apply_sidecars, copy_sidecars, longest_sequence, save_sidecars

CONFIG = {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": None}
OURS = {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 9, "hidden_size": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    (folder / "generation_config.json").write_text('{"bos_token_id": 1}')
    (folder / "evil.py").write_text("raise SystemExit")
    return folder


def test_they_come_back(folder: Path, tmp_path: Path) -> None:
    save_sidecars(folder, tmp_path / "kept", folder / "tokenizer.json")
    copy_sidecars(tmp_path / "kept", folder / "tokenizer.json", tmp_path / "again", folder / "tokenizer.json")
    (tmp_path / "out").mkdir()
    config = apply_sidecars(tmp_path / "again", tmp_path / "out", OURS)
    assert config == {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": [2, 5], "hidden_size": 4}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"chat_template.jinja", "generation_config.json"}
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{% for m in messages %}"


@pytest.mark.parametrize("other", ["{ }", None])
def test_with_other_tokens_only_the_length_is_known(folder: Path, tmp_path: Path, other: str | None) -> None:
    tokenizer = None if other is None else tmp_path / "tokenizer.json"
    if tokenizer is not None and other is not None:
        tokenizer.write_text(other)
    save_sidecars(folder, tmp_path / "kept", tokenizer)
    (tmp_path / "out").mkdir()
    assert apply_sidecars(tmp_path / "kept", tmp_path / "out", OURS) == OURS | {"max_position_embeddings": 8192}
    assert not list((tmp_path / "out").iterdir())


def test_a_run_from_scratch_has_no_sidecars(tmp_path: Path) -> None:
    assert apply_sidecars(tmp_path / "nowhere", tmp_path, OURS) == OURS


def test_a_run_takes_as_many_tokens_as_its_export_says(tmp_path: Path) -> None:
    """The export's config.json is the reference."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = Model(vocab_size=64, layers=1, dim=16, heads=2, kv_heads=1)
    for seq in (64, 16384):
        for sidecars, original in ((tmp_path, CONFIG), (tmp_path / "none", {})):
            exported = apply_sidecars(sidecars, tmp_path, model.to_config(seq))
            assert longest_sequence(model, seq, original) == exported["max_position_embeddings"]
