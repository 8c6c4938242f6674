"""The cache of each layer's owner, and its proxy on rank 0."""
