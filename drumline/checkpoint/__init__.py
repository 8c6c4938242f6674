"""Safetensors slices, read straight to the rank that owns them."""
