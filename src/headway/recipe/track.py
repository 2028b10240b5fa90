"""Recipe section `track`: trackers that a run's metrics are also sent to while it trains.

Secrets are never in a recipe: servers' keys come from the environment, by the names that their libraries use.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from headway.recipe.section import NotNegative, Positive, Section

_WITH_PASSWORD = re.compile(r"[a-z+]+://[^/?#]*@")


def _without_secret(address: str) -> str:
    """Refuse an address with a password or a token in it."""
    if _WITH_PASSWORD.match(address):
        raise ValueError("an address with a password would be saved with the run: put it into the environment")
    return address


Address = Annotated[str, Field(min_length=1), AfterValidator(_without_secret)]


class MLflow(Section):
    """An MLflow server. Its key, if it needs one: MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD."""

    uri: Address | None = None
    """http://HOST:PORT, or another tracking URI; by default MLFLOW_TRACKING_URI of the environment."""
    experiment: Annotated[str, Field(min_length=1)] = "headway"
    """The experiment that runs are in."""


class Wandb(Section):
    """Weights & Biases. Its key: WANDB_API_KEY; another server than its own: WANDB_BASE_URL."""

    project: Annotated[str, Field(min_length=1)] = "headway"
    """The project that runs are in."""
    entity: str | None = None
    """The team or user; by default the key's own."""
    mode: Literal["online", "offline"] = "online"
    """Offline writes files into the run's folder `trackers/wandb`, which `wandb sync` sends later."""


class TensorBoard(Section):
    """Event files for TensorBoard."""

    folder: Annotated[str, Field(min_length=1)]
    """The folder that gets one folder per run."""


class Webhook(Section):
    """A URL that gets a POST of JSON when a run starts, evaluates, has an incident, or ends."""

    url: Address | None = None
    """The URL, if anybody may know it."""
    variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """The environment variable with the URL, if it is a secret."""
    every_steps: NotNegative = 0
    """Also send the metrics of every Nth step; 0: of none."""

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if (self.url is None) == (self.variable is None):
            raise ValueError("track.webhook needs either url, or variable: the environment variable that has it")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("track.webhook.url begins with http:// or https://")
        return self


class Track(Section):
    """Other trackers that get a run's metrics while it trains, from a process that cannot delay the run."""

    every_steps: Positive = 1
    """Send the metrics of every Nth step; evaluations, logged values and the last step are always sent."""
    linger_s: Annotated[float, Field(ge=0, le=3600)] = 120.0
    """How long after the run's end to go on sending to a server that does not answer."""
    mlflow: MLflow | None = None
    """An MLflow server."""
    wandb: Wandb | None = None
    """Weights & Biases."""
    tensorboard: TensorBoard | None = None
    """Event files for TensorBoard."""
    webhook: Webhook | None = None
    """A URL that is told of the run's events."""

    def names(self) -> list[str]:
        """Return the trackers that are set."""
        return [name for name in ("mlflow", "wandb", "tensorboard", "webhook") if getattr(self, name) is not None]
