"""The engine `slurm`."""
