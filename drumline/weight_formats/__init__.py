"""Weights that are computed while they are read: LoRA adapters, quantized formats."""
