"""Estimates settings: step time, memory, throughput and MFU."""

from dataclasses import dataclass
from functools import cached_property

from headway.plan.architecture import Architecture
from headway.plan.costs import CostModel
from headway.plan.flops import flops_per_token, flops_per_token_full_attention
from headway.plan.memory import PeakMemory, memory
from headway.plan.settings import Settings
from headway.plan.step import Step, cut_stages, step


@dataclass(frozen=True)
class Estimate:
    """Time and memory of one set of settings."""

    architecture: Architecture
    settings: Settings
    step: Step
    memory: PeakMemory
    peak_flops_s: float
    """Per device, at the precision of the GEMMs."""

    @cached_property
    def tokens_s(self) -> float:
        """Tokens per second of all devices."""
        return self.settings.batch * self.settings.seq / self.step.seconds

    @property
    def tokens_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_s / self.settings.mesh.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization against the vendor's dense peak; causal attention counts half."""
        return self.tokens_s_per_device * flops_per_token(self.architecture, self.settings.seq) / self.peak_flops_s

    @property
    def mfu_full_attention(self) -> float:
        """The same with attention counted as if it were not causal."""
        flops = flops_per_token_full_attention(self.architecture, self.settings.seq)
        return self.tokens_s_per_device * flops / self.peak_flops_s


def estimate(arch: Architecture, settings: Settings, costs: CostModel) -> Estimate:
    """Time and memory of settings; pipeline stages are cut if they are left to the trainer."""
    settings = cut_stages(arch, settings, costs)
    step_time = step(arch, settings, costs)
    peak = memory(arch, settings, costs.cluster, step_time.in_flight)
    return Estimate(arch, settings, step_time, peak, costs.rates.peak(settings.precision))
