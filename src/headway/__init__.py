"""Headway trains foundation models and accounts for every GPU-second."""

__all__ = ["__version__"]

__version__ = "0.1.0"
