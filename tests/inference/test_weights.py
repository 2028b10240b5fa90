"""New weights for a running engine, and weights from a store: what they give is what a fresh engine gives."""

import json
from pathlib import Path

import pytest
import torch

from headway.data.tokenizer import train_tokenizer
from headway.errors import ModelError, RunError
from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.inference.load import live_model, load_model
from headway.models import Decoder, empty_decoder, init_weights
from headway.recipe import Data, Model, Recipe, Train
from headway.state import CheckpointFacts, begin_checkpoint, shard_name, write_shard
from headway.state.object_store import open_store
from headway.state.store_checkpoint import upload
from headway.state.tensors import named_state, pieces

MODEL = Model(vocab_size=320, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
PROMPTS = [[5, 17, 9, 9, 9, 30, 2, 8, 8], [9] * 20, [1, 2, 3]]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def make_decoder(seed: int) -> Decoder:
    decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=seed)
    return decoder.eval()


def make_llm(decoder: Decoder, overlaps: bool = False) -> LLM:
    loaded = LoadedModel("tiny", decoder, torch.device("cpu"), 300, 200)
    return LLM(loaded, options=EngineOptions(cache_tokens=400, block_size=4, overlaps=overlaps))


def tokens_of(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]


def run_with_swap(llm: LLM, requests: str, weights: dict[str, torch.Tensor]) -> dict[str, list[tuple[int, int]]]:
    """Start two requests, swap after some steps, add a third; return tokens and versions."""
    outputs: dict[str, list[tuple[int, int]]] = {"0": [], "1": [], "2": []}
    for number in (0, 1):
        llm.engine.add(str(number), PROMPTS[number], GREEDY)
    step = 0
    while llm.engine.busy:
        if step == 5:
            llm.swap_weights(weights, 7, requests=requests)  # type: ignore[arg-type]
            for weight in weights.values():
                weight.zero_()  # the caller's own may change at once
            llm.engine.add("2", PROMPTS[0], GREEDY)
        for part in llm.engine.step():
            if part.output.token_id is not None:
                outputs[part.output.request_id].append((part.output.token_id, part.output.version))
        step += 1
    return outputs


@pytest.mark.parametrize("overlaps", [False, True])
def test_running_requests_finish_on_their_weights(overlaps: bool) -> None:
    old, new = (tokens_of(make_llm(make_decoder(seed))) for seed in (0, 1))
    weights = {name: weight.detach().clone() for name, weight in make_decoder(1).named_parameters()}
    outputs = run_with_swap(make_llm(make_decoder(0), overlaps), "finish", weights)
    assert outputs["0"] == [(token, 0) for token in old[0]]
    assert outputs["1"] == [(token, 0) for token in old[1]]
    assert outputs["2"] == [(token, 7) for token in new[0]], "it shares a prompt, but no cache, with the first"


@pytest.mark.parametrize("overlaps", [False, True])
def test_running_requests_continue_on_new_weights(overlaps: bool) -> None:
    old, new = (tokens_of(make_llm(make_decoder(seed))) for seed in (0, 1))
    weights = {name: weight.detach().clone() for name, weight in make_decoder(1).named_parameters()}
    llm = make_llm(make_decoder(0), overlaps)
    outputs = run_with_swap(llm, "continue", weights)
    versions = [version for _, version in outputs["0"]]
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    before = versions.count(0)
    assert [token for token, _ in outputs["0"][:before]] == old[0][:before]
    assert outputs["0"][before:] != [(token, 7) for token in old[0][before:]]
    assert outputs["2"] == [(token, 7) for token in new[0]]
    assert tokens_of(llm) == new, "nothing that was computed by both is shared"


def test_weights_of_a_live_trainer_are_its_own() -> None:
    decoder = make_decoder(0)
    llm = LLM(live_model(decoder), options=EngineOptions(cache_tokens=400, block_size=4))
    before = tokens_of(llm)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.3)
    decoder(torch.tensor([PROMPTS[1]]), labels_BL=torch.tensor([PROMPTS[1]])).backward()
    llm.update_weights(optimizer.step, 1)
    after = tokens_of(llm)
    assert after != before
    assert after == tokens_of(LLM(live_model(decoder), options=EngineOptions(cache_tokens=400)))


def test_weights_of_another_model_are_refused() -> None:
    llm = make_llm(make_decoder(0))
    weights = dict(make_decoder(1).named_parameters())
    name = next(iter(weights))
    with pytest.raises(ModelError, match="is missing"):
        llm.swap_weights({key: value for key, value in weights.items() if key != name}, 1)
    with pytest.raises(ModelError, match="is not in the model"):
        llm.swap_weights(weights | {"other": torch.zeros(1)}, 1)
    with pytest.raises(ModelError, match="has shape"):
        llm.swap_weights(weights | {name: torch.zeros(1)}, 1)


def test_model_in_a_store(tmp_path: Path) -> None:
    """As a run uploads it: small files under `folder/`, checkpoints beside."""
    url = f"file://{tmp_path}/bucket/tiny"
    store = open_store(url)
    tokenizer = train_tokenizer(["def headway(steps): return steps"] * 3, vocab_size=300)
    recipe = Recipe(name="tiny", model=MODEL, data=Data(path="none"), train=Train(steps=1, device="cpu"))
    files = {
        "recipe.json": recipe.model_dump_json().encode(),
        "tokenizer.json": tokenizer.to_bytes(),
        "data.json": json.dumps({"end_of_text": tokenizer.end_of_text}).encode(),
    }
    for name, content in files.items():
        store.put(f"folder/{name}", memoryview(content))
    for step in (1, 2):
        save = begin_checkpoint(tmp_path / "checkpoints", step)
        shard = write_shard(save.partial, shard_name(0), pieces(named_state(make_decoder(step))))
        facts = CheckpointFacts(cursor=0, chain="", data_version="0" * 16)
        content = memoryview((save.partial / shard_name(0)).read_bytes())
        upload(store, step, facts, [(shard, content)], 1, "0" * 16)
    for address, step in ((url, 2), (f"{url}@1", 1)):
        loaded = load_model(address)
        assert (loaded.step, loaded.name) == (step, f"tiny@{step}")
        expected = dict(make_decoder(step).named_parameters())
        assert all(torch.equal(weight, expected[name]) for name, weight in loaded.module.named_parameters())
        assert loaded.tokenizer is not None
    with pytest.raises(RunError, match="no checkpoint of step 9"):
        load_model(f"{url}@9")
    with pytest.raises(RunError, match="no run with a checkpoint"):
        load_model(f"file://{tmp_path}/bucket/none")
