"""Machines without the run folder: bundles, the folder server, record forwarding, the store mirror."""
