"""A package that knows nothing of Headway: its models are plain PyTorch."""
