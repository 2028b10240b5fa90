"""The objective of a recipe."""

from typing import Any, cast

from headway.errors import ModelError
from headway.recipe.diffusion import Ddpm, Flow
from headway.recipe.objective import (
    AnyObjective,
    CustomObjective,
    Distill,
    Dpo,
    Kto,
    Orpo,
    Pretrain,
    Reward,
    Sft,
    SimPo,
)
from headway.recipe.own_code import load_name
from headway.recipe.policy import PolicyGradient
from headway.recipe.rl import Rl
from headway.train.objectives.base import CountedObjective, NextToken, WeightedTokens
from headway.train.objectives.diffusion import DenoisingLoss
from headway.train.objectives.distill import DistillLoss
from headway.train.objectives.kto import KtoLoss
from headway.train.objectives.policy import PolicyLoss
from headway.train.objectives.preference import DpoLoss, OrpoLoss, SimPoLoss
from headway.train.objectives.reward import RewardLoss


def make_objective(recipe: AnyObjective, weighted: bool = False, rl: Rl | None = None) -> CountedObjective:
    """Return the objective of a recipe; `weighted`: whether some document's weight is not 1; `rl`: of a policy."""
    match recipe:
        case Pretrain():
            return NextToken()
        case Sft():
            return WeightedTokens() if weighted else NextToken()
        case Dpo():
            return DpoLoss(recipe)
        case Orpo():
            return OrpoLoss(recipe)
        case SimPo():
            return SimPoLoss(recipe)
        case Kto():
            return KtoLoss(recipe)
        case Reward():
            return RewardLoss(recipe)
        case Distill():
            return DistillLoss(recipe, weighted)
        case PolicyGradient():
            assert rl is not None, "a recipe with a policy has a section rl"
            return PolicyLoss(recipe, rl)
        case Flow() | Ddpm():
            return DenoisingLoss(recipe)
        case CustomObjective():
            return _custom(recipe)


def _custom(recipe: CustomObjective) -> CountedObjective:
    """Construct an objective of the user's own, and check that it has what the loop needs."""
    cls = load_name(recipe.class_, "objective.class")
    try:
        objective: Any = cls(**recipe.args)
    except Exception as error:
        raise ModelError(f"{recipe.class_} cannot be built with objective.args: {error}") from error
    missing = [name for name in ("names", "terms", "columns", "counts", "measure") if not hasattr(objective, name)]
    if missing:
        raise ModelError(
            f"{recipe.class_} has no {missing[0]}", hint="an objective has names, terms, columns, counts and measure"
        )
    return cast(CountedObjective, objective)
