"""Llama 2 and 3, SmolLM2, SmolLM3, Mistral, Qwen2 and Qwen3 against `transformers`."""

from pathlib import Path

from family_cases import SIZES, Case, assert_round_trip

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}

CASES = [
    Case("Llama 2", "LlamaConfig", SIZES | {"num_key_value_heads": 6}, "llama", "untied head"),
    Case("Llama 3", "LlamaConfig", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "llama",
         "scaled positions (llama3), tied"),
    Case("Llama, linear", "LlamaConfig", SIZES | {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
         "llama", "scaled positions (linear), biases"),
    Case("SmolLM2", "LlamaConfig", SIZES | {"tie_word_embeddings": True}, "llama", "tied"),
    Case("SmolLM3", "SmolLM3Config", SIZES, "smollm3", "layers without positions"),
    Case("Mistral", "MistralConfig", SIZES | {"sliding_window": 9}, "mistral", "sliding window"),
    Case("Qwen2", "Qwen2Config", SIZES | {"tie_word_embeddings": True}, "llama", "biases on queries, keys, values"),
    Case("Qwen2.5, YaRN", "Qwen2Config", SIZES | {"rope_parameters": YARN}, "llama", "scaled positions (yarn)"),
    Case("Qwen3", "Qwen3Config", SIZES, "llama", "norms of queries and keys"),
]  # fmt: skip


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    assert_round_trip(CASES[0], tmp_path, max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
