"""Faster ways of a processor: memory in huge pages, products by oneDNN."""
