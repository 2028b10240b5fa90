"""A reinforcement learning algorithm as a plain loop: leave-one-out advantages, two updates per batch of answers.

    python examples/policy_loop.py

A model with random weights learns to write an "e" in its answers. Every call is an ordinary function call in this
process: set a breakpoint anywhere.
"""

import json
from pathlib import Path

import headway as hw
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.tokenizer import END_OF_TEXT, train_tokenizer
from headway.recipe import Recipe

PROMPTS, ANSWERS, STEPS = 4, 8, 16
WEATHER = ("wind", "rain", "snow", "hail", "fog", "sun", "frost", "cloud", "storm", "dew", "mist", "ice")


def main() -> None:
    """Build prompts, train, save, and continue from what was saved."""
    client = hw.PolicyClient(recipe(make_prompts(Path("data"))), threads=1)
    for step in range(STEPS):
        answers = client.sample(client.prompts(PROMPTS), n=ANSWERS)
        rewards = [answer.score.reward for answer in answers if answer.score is not None]
        advantages = leave_one_out(rewards)

        proximal = client.logprobs(answers)  # what ratios compare with after the first update
        for _ in range(2):
            metrics = client.forward_backward(answers, advantages, proximal=proximal)
            client.optim_step(lr=1e-2)
        if step % 5 == 0:
            print(f"batch {step}: reward {sum(rewards) / len(rewards):.2f}, ratio {metrics['ratio']:.3f}")

    state = client.save_state()
    expected = client.sample(["Say something."], n=2)
    client.load_state(state)
    again = client.sample(["Say something."], n=2)
    print(f"{state.name}: {'the same' if expected == again else 'other'} answers after loading it")
    client.close()


def leave_one_out(rewards: list[float]) -> list[float]:
    """Return how much better each answer is than the mean of the others to its prompt."""
    groups = [rewards[first : first + ANSWERS] for first in range(0, len(rewards), ANSWERS)]
    return [reward - (sum(group) - reward) / (ANSWERS - 1) for group in groups for reward in group]


def recipe(dataset: Path) -> Recipe:
    """Return a tiny model and a policy gradient without clipping."""
    return Recipe.model_validate({
        "name": "policy-loop",
        "model": {"layers": 2, "dim": 32, "heads": 2},
        "objective": {"kind": "rloo"},
        "rl": {"rewards": [{"name": "regex", "args": {"pattern": "e", "search": True}}], "max_tokens": 8, "updates": 2},
        "data": {"path": str(dataset), "seq": 48},
        "train": {"batch": PROMPTS, "steps": 2 * STEPS, "device": "cpu"},
    })  # fmt: skip


def make_prompts(folder: Path) -> Path:
    """Build a dataset of prompts, with a tokenizer and a chat template of its own."""
    model = folder / "tokenizer"
    model.mkdir(parents=True, exist_ok=True)
    texts = [f"Say {word} in a sentence." for word in WEATHER]
    (model / "tokenizer.json").write_bytes(train_tokenizer(texts, vocab_size=300).to_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    build_chat_dataset(folder / "prompts", [file], ChatOptions(str(model), prompts=True), force=True)
    return folder / "prompts"


if __name__ == "__main__":
    main()
