"""One pool of GPUs for many: tenants, queues, what is decided and why, and a simulator that runs the same code."""
