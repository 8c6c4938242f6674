"""Adapters by which inference engines work on the lower layers, unchanged."""
