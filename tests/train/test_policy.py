"""Policy gradients against float64 references written from the papers, answer by answer, on full logits."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headway.data.loader import Batch
from headway.models.entropy import logprobs_and_entropy
from headway.models.loss import token_logprobs
from headway.parallel.objective import DeviceBatch, SumScale, loss_of
from headway.recipe.policy import PRESETS, PolicyGradient
from headway.recipe.rl import Rl
from headway.rl.advantages import advantages, batch_advantages, divergences, returns
from headway.train.objectives import make_objective
from headway.train.objectives.policy import ADVANTAGE, BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS, WEIGHT

VOCABULARY, TEMPERATURE, MAX_TOKENS = 13, 0.8, 9
EXACT = {"rtol": 2e-4, "atol": 1e-6}


def make_rl(**changes) -> Rl:
    return Rl.model_validate(
        {"rewards": ["math"], "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "updates": 2, **changes}
    )


@dataclass
class Answer:
    """An answer of n tokens; `logits` [n, V] are the model's, in float64."""

    prompt: int
    tokens: torch.Tensor
    written: torch.Tensor
    """[n]: an environment wrote the others."""
    logits: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor
    reference: torch.Tensor
    advantage: float | torch.Tensor
    """Of all its tokens, or [n]."""
    present: bool = True

    @property
    def current(self) -> torch.Tensor:
        """Of the tokens that the model wrote, as are all below."""
        return self.distribution.gather(1, self.tokens[:, None])[self.written, 0]

    @property
    def distribution(self) -> torch.Tensor:
        return (self.logits / TEMPERATURE).log_softmax(-1)

    def old(self, name: str) -> torch.Tensor:
        return getattr(self, name)[self.written]


def make_answers(seed: int, apart: float = 0.3, groups: int = 2, size: int = 4) -> list[Answer]:
    """Groups of answers of 1 to 7 tokens, one of which is left out; log-probabilities differ by about `apart`."""
    rng = np.random.default_rng(seed)
    values = advantages(rng.normal(size=(groups, size)), "group").ravel()
    answers = []
    for number, advantage in enumerate(values.tolist()):
        n = 1 if number == 1 else int(rng.integers(2, 8))
        tokens = torch.from_numpy(rng.integers(0, VOCABULARY, n))
        written = torch.ones(n, dtype=torch.bool)
        if number == 2:
            written[1:-1] = False
        logits = torch.from_numpy(rng.normal(0, 1.5, (n, VOCABULARY)))
        now = (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        proximal, behaviour, reference = (now + torch.from_numpy(rng.normal(0, apart, n)) for _ in range(3))
        # As float32, which columns are: the reference is to see the same numbers.
        olds = (old.float().double() for old in (behaviour, proximal, reference))
        advantage = float(np.float32(advantage))
        answers.append(Answer(int(rng.integers(1, 4)), tokens, written, logits, *olds, advantage, number != 4))
    return answers


PACKINGS = [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5], [0, 3], [4], [1, 2, 7, 6]], [[7, 6, 5], [4, 3, 2], [1, 0]]]


def packed(answers: list[Answer], packing: list[list[int]]) -> tuple[Batch, torch.Tensor]:
    """Rows of documents with padding, and the logits of all positions, which depend on the answers'."""
    width = max(len(row) for row in packing) + 1
    seq = 3 + max(sum(answers[i].prompt + len(answers[i].tokens) for i in row) for row in packing)
    shape = (len(packing), seq)
    documents, labels = np.zeros(shape, dtype=np.int32), np.full(shape, -100)
    by_token = (ADVANTAGE, BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS)
    # NaN where nothing may be read.
    columns = {name: np.full(shape, np.nan, dtype=np.float32) for name in by_token}
    columns[WEIGHT] = np.zeros((len(packing), width), dtype=np.float32)
    logits = torch.zeros(*shape, VOCABULARY, dtype=torch.float64)
    for row, members in enumerate(packing):
        place = 0
        for number, index in enumerate(members):
            answer = answers[index]
            documents[row, place:] = number
            first = place + answer.prompt - 1
            span = slice(first, first + len(answer.tokens))
            labels[row, span] = np.where(answer.written, answer.tokens, -100)
            logits[row, span] = answer.logits
            columns[WEIGHT][row, number] = answer.present
            for name, old in (
                (BEHAVIOUR, answer.behaviour), (PROXIMAL, answer.proximal), (REFERENCE_LOGPROBS, answer.reference),
                (ADVANTAGE, answer.advantage),
            ):  # fmt: skip
                columns[name][row, span] = np.where(answer.written, old, np.nan)
            place += answer.prompt + len(answer.tokens)
        documents[row, place:] = len(members)
    return Batch(labels, labels, int((labels != -100).sum()), documents, columns), logits


def measured(recipe: PolicyGradient, rl: Rl, answers: list[Answer], packing: list[list[int]], rows: int = 99):
    """Return named values of a step, the loss, and its gradient over each answer's logits; `rows` at once."""
    leaves = [answer.logits.clone().requires_grad_() for answer in answers]
    moved = [Answer(**{**vars(answer), "logits": leaf}) for answer, leaf in zip(answers, leaves, strict=True)]
    host, logits = packed(moved, packing)
    objective = make_objective(recipe, rl=rl)
    columns = {name: torch.from_numpy(host.columns[name]) for name in objective.columns}
    whole = DeviceBatch(*(torch.from_numpy(x) for x in (host.inputs, host.labels, host.documents)), columns)
    scale = SumScale(tuple(1 / (count or 1) for count in objective.counts(host)), 1.0)
    total, loss = torch.zeros(len(objective.names)), torch.zeros(())
    for low in range(0, len(host.labels), rows):
        batch = whole.rows(low, low + rows)
        x, eye = logits[low : low + rows].float().flatten(0, 1), torch.eye(VOCABULARY)
        if objective.wants_entropy:
            flat = logprobs_and_entropy(x, eye, batch.labels.flatten(), objective.temperature, None, 7)
        else:
            flat = token_logprobs(x, eye, batch.labels.flatten(), None, objective.temperature)
        scores = flat.view(*batch.labels.shape, *flat.shape[1:])
        values = scale.of(objective.measure(scores, batch))
        total, loss = total + values.detach(), loss + loss_of(values, objective.terms)
    gradients = torch.autograd.grad(loss, leaves)
    return dict(zip(objective.names, total.tolist(), strict=True)), loss.detach(), gradients


SPLITS = ((PACKINGS[0], 1), (PACKINGS[1], 4), (PACKINGS[1], 1), (PACKINGS[2], 2))
"""Packings, and rows at once."""


def compare(recipe: PolicyGradient, rl: Rl, answers: list[Answer], true_loss, splits=SPLITS) -> None:
    """Compare value and gradients in several packings, at once and row by row."""
    leaves = [answer.logits.clone().requires_grad_() for answer in answers]
    moved = [Answer(**{**vars(answer), "logits": leaf}) for answer, leaf in zip(answers, leaves, strict=True)]
    true = true_loss([answer for answer in moved if answer.present])
    slopes = torch.autograd.grad(true, leaves, allow_unused=True)
    for packing, rows in splits:
        _, loss, gradients = measured(recipe, rl, answers, packing, rows)
        torch.testing.assert_close(loss.double(), true.detach(), rtol=1e-4, atol=1e-6)
        for answer, gradient, slope in zip(answers, gradients, slopes, strict=True):
            expected = torch.zeros_like(answer.logits) if slope is None else slope
            torch.testing.assert_close(gradient, expected, **EXACT)


# -- presets, in the words of their papers


def clipped_terms(answer: Answer, ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A)."""
    bounded = torch.where(ratio < 1 - low, 1 - low, torch.where(ratio > 1 + high, 1 + high, ratio))
    a, b = ratio * answer.advantage, bounded * answer.advantage
    return torch.where(a < b, a, b)


def token_ratio(answer: Answer) -> torch.Tensor:
    return answer.current.exp() / answer.old("proximal").exp()


def grpo(answers):
    """DeepSeekMath, eq. 3, without a divergence: 1/G sum_i 1/|o_i| sum_t min(...)."""
    return -sum(clipped_terms(a, token_ratio(a), 0.2, 0.2).mean() for a in answers) / len(answers)


def dr_grpo(answers):
    """Understanding R1-Zero-like training: 1/G sum_i sum_t min(...), divided by the generation budget."""
    return -sum(clipped_terms(a, token_ratio(a), 0.2, 0.2).sum() for a in answers) / len(answers) / MAX_TOKENS


def dapo(answers):
    """DAPO, eq. 8: 1 / sum_i |o_i| over all tokens, clip-higher 0.28."""
    total = sum(clipped_terms(a, token_ratio(a), 0.2, 0.28).sum() for a in answers)
    return -total / sum(len(a.current) for a in answers)


def gspo(answers):
    """GSPO, eq. 5 and 7: the ratio of the answers' probabilities to the power of 1/|y|."""
    total = 0
    for a in answers:
        ratio = (a.current.sum().exp() / a.old("proximal").sum().exp()) ** (1 / len(a.current))
        total = total + clipped_terms(a, ratio, 3e-4, 4e-4)
    return -total / len(answers)


def cispo(answers):
    """MiniMax-M1, eq. 4 and 5: sg(clip(r)) A log p over all tokens, without a lower bound."""
    total = sum((token_ratio(a).detach().clamp(max=5.0) * a.advantage * a.current).sum() for a in answers)
    return -total / sum(len(a.current) for a in answers)


def rloo(answers):
    """RLOO: advantages times the policy gradient of whole answers, here with ratios for later updates."""
    return -sum(a.advantage * token_ratio(a).sum() for a in answers) / len(answers)


def reinforce_plus_plus(answers):
    """REINFORCE++, with PPO's clipping; its divergence is in the advantages."""
    total = sum(clipped_terms(a, token_ratio(a), 0.2, 0.2).sum() for a in answers)
    return -total / sum(len(a.current) for a in answers)


PAPERS = {
    "grpo": grpo, "dr-grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo, "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
}  # fmt: skip


@pytest.mark.parametrize("kind", PRESETS)
def test_presets_are_those_of_the_papers_however_answers_are_packed(kind):
    for seed in (0, 1):
        compare(PolicyGradient(kind=kind), make_rl(), make_answers(seed), PAPERS[kind])


def test_reinforce_plus_plus_from_rewards_to_gradients():
    """A_t = r - beta sum over i >= t of (log q_i - log f_i), normalized over the tokens of all answers that count."""
    recipe, answers, rewards = PolicyGradient(kind="reinforce++", kl_weight=0.3), make_answers(7), np.arange(8) % 3.0
    returned, counts, true = [], [], []
    for answer, reward in zip(answers, rewards, strict=True):
        gaps = np.where(answer.written, divergences(answer.proximal, answer.reference, "k1"), 0.0)
        returned.append(returns(reward, recipe.kl_weight * gaps))
        counts.append(answer.written.numpy() & answer.present)
        apart = (answer.old("proximal") - answer.old("reference")).tolist()
        true.append([reward - 0.3 * sum(apart[t:]) for t in range(len(apart))])
    kept = [value for answer, values in zip(answers, true, strict=True) if answer.present for value in values]
    for answer, values in zip(answers, batch_advantages(returned, counts), strict=True):
        answer.advantage = torch.from_numpy(values.astype(np.float32)).double()

    def paper(present):
        normalized = {id(answer.tokens): values for answer, values in zip(answers, true, strict=True)}
        total = 0
        for answer in present:
            values = torch.tensor(normalized[id(answer.tokens)], dtype=torch.float64)
            advantage = (values - np.mean(kept)) / (np.std(kept, ddof=1) + 1e-6)
            ratio = token_ratio(answer)
            total = total + torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        return -total / len(kept)

    compare(recipe, make_rl(), answers, paper)


@pytest.mark.parametrize("kind", PRESETS)
def test_at_the_first_update_all_presets_are_policy_gradients(kind):
    """Without the column of an update's beginning, ratios are 1 and gradients A times those of log-probabilities."""
    recipe, answers = PolicyGradient(kind=kind), make_answers(3)

    def reinforce(answers):
        tokens = sum(len(a.current) for a in answers)
        total = 0
        for a in answers:
            share = {"sequence": 1 / len(a.current) / len(answers), "tokens": 1 / tokens,
                     "constant": 1 / (recipe.normalizer_tokens or MAX_TOKENS) / len(answers)}  # fmt: skip
            total = total - a.advantage * a.current.sum() * share[recipe.normalizer]
        return total

    leaves = [answer.logits.clone().requires_grad_() for answer in answers]
    moved = [Answer(**{**vars(answer), "logits": leaf}) for answer, leaf in zip(answers, leaves, strict=True)]
    true = torch.autograd.grad(reinforce([a for a in moved if a.present]), leaves, allow_unused=True)
    rl = make_rl(updates=1)
    assert PROXIMAL not in make_objective(recipe, rl=rl).columns
    _, _, gradients = measured(recipe, rl, answers, PACKINGS[1])
    for gradient, slope in zip(gradients, true, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if slope is None else slope, **EXACT)


# -- parts, one by one


KL = {
    "none": lambda d: 0 * d,
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
}


def in_parts(recipe: PolicyGradient):
    """The loss of any recipe, in float64."""

    def loss(answers):
        tokens, total = sum(len(a.current) for a in answers), 0
        for a in answers:
            apart = a.current - a.old("proximal")
            ratio = torch.exp(apart if recipe.ratio == "token" else apart.mean().expand(len(apart)))
            bounded = torch.clamp(ratio, 1 - recipe.clip_low, 1 + recipe.clip_high)
            terms = {
                "ppo": lambda r=ratio, b=bounded, a=a.advantage: torch.min(r * a, b * a),
                "cispo": lambda b=bounded, a=a: b.detach() * a.advantage * a.current,
                "none": lambda r=ratio, a=a.advantage: r * a,
            }[recipe.clip]()
            factor, limit = (a.old("proximal") - a.old("behaviour")).exp(), recipe.correction_limit
            if recipe.correction == "truncate":
                terms = terms * torch.minimum(factor, torch.tensor(limit))
            if recipe.correction == "mask":
                terms = terms * torch.where((factor <= limit) & (factor >= 1 / limit), factor, 0.0)
            if recipe.kl_in == "loss":
                terms = terms - recipe.kl_weight * KL[recipe.kl](a.current - a.old("reference"))
            p = a.distribution[a.written]
            terms = terms - recipe.entropy * (p.exp() * p).sum(-1)
            share = {"sequence": 1 / len(terms) / len(answers), "tokens": 1 / tokens,
                     "constant": 1 / (recipe.normalizer_tokens or MAX_TOKENS) / len(answers)}  # fmt: skip
            total = total - terms.sum() * share[recipe.normalizer]
        return total

    return loss


OTHERS = [
    {"kl": "k1", "kl_weight": 0.3},
    {"kl": "k2", "kl_weight": 0.3, "correction": "truncate", "correction_limit": 1.2},
    {"kl": "k3", "kl_weight": 0.3, "correction": "mask", "correction_limit": 1.3, "entropy": 0.2},
    {"kl": "k1", "kl_weight": 0.3, "kl_in": "reward", "entropy": 0.7},
    {"correction": "mask", "correction_limit": 1.1, "normalizer_tokens": 3},
]


@pytest.mark.parametrize("normalizer", ["sequence", "tokens", "constant"])
@pytest.mark.parametrize("clip", ["ppo", "cispo", "none"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_all_parts_together_are_their_definition(ratio, clip, normalizer):
    for seed, others in enumerate(OTHERS):
        values = {"kind": "grpo", "ratio": ratio, "clip": clip, "normalizer": normalizer, **others}
        recipe = PolicyGradient.model_validate(values)
        compare(recipe, make_rl(), make_answers(seed), in_parts(recipe), SPLITS[-1:])


HISTOGRAM = ("ratio/0-0.5", "ratio/0.5-0.8", "ratio/0.8-0.95", "ratio/0.95-1.05", "ratio/1.05-1.2", "ratio/1.2-2",
             "ratio/2-inf")  # fmt: skip


def test_metrics_are_means_over_tokens():
    values = {"kind": "grpo", "kl": "k3", "kl_weight": 0.1, "entropy": 0.1, "correction": "mask",
              "correction_limit": 1.25}  # fmt: skip
    recipe, answers = PolicyGradient.model_validate(values), make_answers(5)
    named, loss, _ = measured(recipe, make_rl(), answers, PACKINGS[2])
    present = [answer for answer in answers if answer.present]
    now, old, sampled, reference = (
        torch.cat(parts)
        for parts in (
            [a.current for a in present],
            *([a.old(name) for a in present] for name in ("proximal", "behaviour", "reference")),
        )
    )
    advantage = torch.cat([torch.full((len(a.current),), a.advantage) for a in present])
    ratio, factor = (now - old).exp(), (old - sampled).exp()
    importance = (now - sampled).exp()
    buckets = np.histogram(importance.detach().numpy(), [0, 0.5, 0.8, 0.95, 1.05, 1.2, 2, np.inf])[0] / len(now)
    assert [named.pop(name) for name in HISTOGRAM] == pytest.approx(buckets.tolist(), rel=1e-5)
    assert np.count_nonzero(buckets) >= 4
    expected = {
        "ratio": importance,
        "ratio_squared": (2 * (now - sampled)).exp(),
        "mismatch": (old - sampled).abs(),
        "clipped_low": ((ratio < 0.8) & (advantage < 0)).double(),
        "clipped_high": ((ratio > 1.2) & (advantage > 0)).double(),
        "corrected": ((factor > 1.25) | (factor < 0.8)).double(),
        "kl": KL["k3"](now - reference),
        "entropy": torch.cat([-(a.distribution.exp() * a.distribution).sum(-1)[a.written] for a in present]),
    }
    for name, tokens in expected.items():
        assert named[name] == pytest.approx(float(tokens.mean()), rel=1e-4), name
        assert float(tokens.abs().sum()) > 0, f"no token of the sample has any {name}"
    terms = ("policy_loss", "kl_loss", "entropy_loss")
    assert set(named) == {*expected, *terms}
    assert sum(named[term] for term in terms) == pytest.approx(float(loss), rel=1e-5)


def test_only_what_applies_is_named_and_needed():
    plain = make_objective(PolicyGradient(kind="rloo"), rl=make_rl(updates=1))
    assert plain.names == ("policy_loss", "ratio", "ratio_squared", "mismatch", *HISTOGRAM)
    assert plain.columns == {WEIGHT, ADVANTAGE, BEHAVIOUR}
    for changes in ({"updates": 2}, {"staleness": 1}):
        assert PROXIMAL in make_objective(PolicyGradient(kind="rloo"), rl=make_rl(**changes)).columns
    corrected = PolicyGradient(kind="grpo", correction="truncate")
    assert PROXIMAL in make_objective(corrected, rl=make_rl(updates=1)).columns
    in_reward = make_objective(PolicyGradient(kind="reinforce++"), rl=make_rl())
    assert REFERENCE_LOGPROBS not in in_reward.columns
    assert in_reward.terms == 1
    in_loss = make_objective(PolicyGradient(kind="grpo", kl="k3", kl_weight=0.04), rl=make_rl())
    assert REFERENCE_LOGPROBS in in_loss.columns


def test_the_ratio_is_exactly_one_where_sampler_and_trainer_agree():
    answers = make_answers(6)
    host, logits = packed(answers, PACKINGS[0])
    labels = torch.from_numpy(host.labels)
    exact = token_logprobs(logits.float().flatten(0, 1), torch.eye(VOCABULARY), labels.flatten(), None, TEMPERATURE)
    host.columns[BEHAVIOUR][:] = exact.view(labels.shape).numpy()
    objective = make_objective(PolicyGradient(kind="grpo"), rl=make_rl(updates=1))
    columns = {name: torch.from_numpy(host.columns[name]) for name in objective.columns}
    batch = DeviceBatch(labels, labels, torch.from_numpy(host.documents), columns)
    sums = dict(zip(objective.names, objective.measure(exact.view(labels.shape), batch).tolist(), strict=True))
    tokens = objective.counts(host)[-1]
    assert sums["ratio"] == sums["ratio_squared"] == sums["ratio/0.95-1.05"] == tokens
    assert sums["mismatch"] == sums["clipped_low"] == sums["clipped_high"] == 0


# -- inputs at the edge


EVERYTHING = {"kl": "k3", "kl_weight": 0.1, "entropy": 0.1, "correction": "truncate"}


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("apart", [50.0, 1000.0])
def test_extreme_ratios_give_finite_losses_and_gradients(kind, apart):
    recipe = PolicyGradient.model_validate({"kind": kind, **EVERYTHING, "kl_in": "loss"})
    for rl in (make_rl(), make_rl(updates=1)):
        named, loss, gradients = measured(recipe, rl, make_answers(0, apart), PACKINGS[1])
        assert math.isfinite(float(loss))
        assert all(math.isfinite(value) for value in named.values()), named
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("kind", PRESETS)
def test_without_advantages_nothing_is_learned(kind):
    answers = make_answers(1)
    for answer in answers:
        answer.advantage = 0.0
    named, loss, gradients = measured(PolicyGradient(kind=kind), make_rl(), answers, PACKINGS[1])
    assert float(loss) == 0
    assert not any(gradient.any() for gradient in gradients)
    assert named.get("clipped_low", 0) == named.get("clipped_high", 0) == 0 or kind == "cispo"


@pytest.mark.parametrize("kind", PRESETS)
def test_a_batch_without_answers_has_no_loss_and_no_counts(kind):
    recipe = PolicyGradient.model_validate({"kind": kind, **EVERYTHING, "kl_in": "loss"})
    answers = make_answers(2)
    for answer in answers:
        answer.present = False
    named, loss, gradients = measured(recipe, make_rl(), answers, PACKINGS[1])
    assert float(loss) == 0
    assert set(named.values()) == {0.0}
    assert not any(gradient.any() for gradient in gradients)
    host, _ = packed(answers, PACKINGS[1])
    assert set(make_objective(recipe, rl=make_rl()).counts(host)) == {0.0}


@pytest.mark.parametrize("kind", PRESETS)
def test_counts_add_up_over_any_split_of_rows(kind):
    objective = make_objective(PolicyGradient(kind=kind), rl=make_rl())
    host, _ = packed(make_answers(3), PACKINGS[1])

    def part(rows: slice) -> Batch:
        labels = host.labels[rows]
        columns = {name: column[rows] for name, column in host.columns.items()}
        return Batch(labels, labels, int((labels != -100).sum()), host.documents[rows], columns)

    counts = [objective.counts(part(slice(row, row + 1))) for row in range(len(host.labels))]
    assert np.sum(counts, axis=0).tolist() == list(objective.counts(host))
    assert {objective.counts(packed(make_answers(3), packing)[0]) for packing in PACKINGS} == {objective.counts(host)}
