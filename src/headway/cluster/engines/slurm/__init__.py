"""The engine `slurm`: jobs through sbatch, srun and scancel."""
