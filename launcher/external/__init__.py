"""Ranks under torchrun, mpiexec and srun: child reaper, rank wrapper."""
