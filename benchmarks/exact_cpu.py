"""What exact mode costs on a CPU: decoding, prefill and training steps, with and without it in turns.

    python benchmarks/exact_cpu.py [--dim 576 --layers 4 ...] [--turns 5] [--threads 1]

A Llama with random weights, of SmolLM2-135M's widths with fewer layers by default. Times are CPU-seconds, and the ratio
is that of the medians: shared machines are noisy, so that the turns alternate. It also counts the sampled tokens whose
log-probability has the bits of the trainer's forward pass, in both modes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from headway.inference import LLM, EngineOptions, SamplingParams
from headway.inference.load import live_model
from headway.models import Decoder, empty_decoder, init_weights
from headway.models.exact import make_exact
from headway.recipe import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "dim": 576, "hidden": 1536, "heads": 9, "kv-heads": 3, "layers": 4, "vocab-size": 16384, "batch": 8,
        "prompt": 64, "tokens": 32, "seq": 512, "rows": 2, "turns": 5, "threads": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    sides = {exact: Side(asked, exact=exact) for exact in (False, True)}
    result = {"settings": vars(asked), "torch": torch.__version__}
    work: dict[str, Callable[[Side], object]] = {
        "decode, batch 1": lambda side: side.decode(1),
        f"decode, batch {asked.batch}": lambda side: side.decode(asked.batch),
        "prefill": lambda side: side.prefill(),
        "training step": lambda side: side.train(),
    }
    for name, run in work.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(asked.turns + 1):
            for exact, side in sides.items():
                started = time.process_time()
                run(side)
                if turn:  # the first one warms up
                    seconds[exact].append(time.process_time() - started)
        plain, exact_s = (statistics.median(seconds[exact]) for exact in (False, True))
        result[name] = {"plain_s": round(plain, 3), "exact_s": round(exact_s, 3), "ratio": round(exact_s / plain, 2)}
    result["equal bits"] = {("exact" if exact else "plain"): side.equal_bits() for exact, side in sides.items()}
    print(json.dumps(result, indent=1))


class Side:
    """A model with an engine and a trainer."""

    def __init__(self, asked: argparse.Namespace, *, exact: bool) -> None:
        self.asked = asked
        model = Model(
            vocab_size=asked.vocab_size, layers=asked.layers, dim=asked.dim, heads=asked.heads, kv_heads=asked.kv_heads,
            hidden=asked.hidden,
        )  # fmt: skip
        self.decoder: Decoder = empty_decoder(model)
        init_weights(self.decoder, seed=0)
        if exact:
            make_exact(self.decoder, torch.device("cpu"))
        options = EngineOptions(cache_tokens=8192, exact=exact, shares_prefixes=False)
        self.llm = LLM(live_model(self.decoder), options=options)
        self.draws = torch.Generator().manual_seed(0)

    def ids(self, *shape: int) -> torch.Tensor:
        """Random tokens."""
        return torch.randint(0, self.asked.vocab_size, shape, generator=self.draws)

    def decode(self, batch: int) -> list[tuple[list[int], list[float]]]:
        """Generate with a batch; return the tokens and log-probabilities."""
        params = SamplingParams(max_tokens=self.asked.tokens, ignore_eos=True, seed=0, logprobs=0)
        results = self.llm.generate(self.ids(batch, self.asked.prompt).tolist(), params)
        return [
            (result.prompt_ids + output.token_ids, [token.logprob for token in output.logprobs])
            for result in results
            for output in result.outputs
        ]

    def prefill(self) -> None:
        """Run prompts of a training step's tokens."""
        self.llm.generate(self.ids(self.asked.rows, self.asked.seq).tolist(), SamplingParams(max_tokens=1, seed=0))

    def train(self) -> None:
        """Forward and backward over log-probabilities, two documents per row."""
        tokens, labels = self.ids(2, self.asked.rows, self.asked.seq)
        documents = (torch.arange(self.asked.seq) > self.asked.seq // 3).int().expand(self.asked.rows, -1)
        self.decoder.zero_grad()
        self.decoder.logprobs(tokens, labels, documents).sum().backward()

    def equal_bits(self) -> str:
        """Count the sampled tokens whose log-probability is the trainer's."""
        equal = total = 0
        for tokens, logprobs in self.decode(self.asked.batch):
            ids = torch.tensor([tokens])
            with torch.no_grad():
                trained = self.decoder.logprobs(ids[:, :-1], ids[:, 1:])[0, -len(logprobs) :]
            equal += int((trained == torch.tensor(logprobs)).sum())
            total += len(logprobs)
        return f"{equal} of {total}"


if __name__ == "__main__":
    main()
