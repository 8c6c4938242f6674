"""Faster ways of a processor: huge pages, products at the rate of memory, no idle threads."""
