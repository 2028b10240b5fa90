"""Optimizers: AdamW, Muon, 8-bit AdamW and Adafactor, and the precision of weights and states.

groups.py            which parameters are trained, by which rule, at which rate
optimizer.py         the optimizer of a run
parameter_state.py   a parameter's local part, its states and their precision
rounding.py          stochastic rounding from (seed, step, tensor, position)
eightbit.py          blockwise 8-bit numbers
adamw.py  muon.py  adafactor.py    the rules
ema.py               exponential moving average of the weights
"""

from headway.train.optim.ema import WeightEma
from headway.train.optim.groups import freeze, lower, set_step, widen_gradients
from headway.train.optim.optimizer import RuleOptimizer, build_optimizer, clip

__all__ = ["RuleOptimizer", "WeightEma", "build_optimizer", "clip", "freeze", "lower", "set_step", "widen_gradients"]
