"""Weights on the CPU or disk, prefetched layer by layer."""
