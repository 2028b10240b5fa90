"""Mistral: Llama with a sliding window."""

from dataclasses import replace
from typing import Any, Literal

from headway.recipe.architecture import Architecture
from headway.recipe.families.llama import Llama, LlamaLike, checked, common_config
from headway.recipe.model import Config, Model
from headway.recipe.section import Positive


class Mistral(LlamaLike):
    """Llama with a sliding window in every layer."""

    family: Literal["mistral"] = "mistral"
    window: Positive = 4096
    """Sliding window in tokens, including the current one."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of mistral; without an effective window, return a Llama."""
        settings = cls._settings(config, "mistral")
        window, longest = config.get("sliding_window", 4096), config.get("max_position_embeddings")
        if window is None or (longest is not None and window >= longest):
            return checked(Llama, settings)
        return checked(cls, settings | {"window": window})

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of mistral, which has no biases."""
        self._refuse_switches()
        return common_config(self, "mistral", seq) | {"sliding_window": self.window}

    def _refuse_switches(self) -> None:
        from headway.errors import ModelError

        for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias"):
            if getattr(self, name):
                raise ModelError(f"no family of `transformers` has a window and {name}", hint=f"model.{name} = false")

    def architecture(self) -> Architecture:
        """Every layer has the window."""
        return replace(super().architecture(), window=self.window, windowed_layers=self.layers)

    def window_of(self, layer: int) -> int | None:
        """The same in all layers."""
        return self.window
