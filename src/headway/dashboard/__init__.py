"""The dashboard: pages in a browser about recorded runs. It reads what is recorded and writes nothing."""

from headway.dashboard.app import make_app
from headway.dashboard.server import new_token, serve

__all__ = ["make_app", "new_token", "serve"]
