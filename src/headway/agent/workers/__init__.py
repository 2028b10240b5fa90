"""The workers of one machine: their environment, the zygote that forks them, the worker group."""
