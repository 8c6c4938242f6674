"""`load()`: pipeline, mesh, both, the fastest; Accelerate's functions."""
