"""Faster ways of a processor: huge pages, products by oneDNN, no idle threads in the way."""
