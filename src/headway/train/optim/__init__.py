"""What makes updates of gradients: AdamW, Muon, 8-bit AdamW, Adafactor, and how weights and states are kept.

groups.py     which parameters are trained, by what rule, at which rate
optimizer.py    the optimizer of a run
parameter_state.py       a parameter's part here, its states, and how they are kept
rounding.py   stochastic rounding from (seed, step, tensor, place)
eightbit.py   numbers of eight bits, scaled block by block
adamw.py  muon.py  adafactor.py    the rules
ema.py        an average of the weights
"""

from headway.train.optim.ema import WeightEma
from headway.train.optim.groups import freeze, lower, set_step, widen_gradients
from headway.train.optim.optimizer import RuleOptimizer, build_optimizer, clip

__all__ = ["RuleOptimizer", "WeightEma", "build_optimizer", "clip", "freeze", "lower", "set_step", "widen_gradients"]
