"""The import path by which Ray restarts controllers created before the engine became a package; goes next release."""

from headway.cluster.engines.ray.controller import RayJobController as Owner

__all__ = ["Owner"]
