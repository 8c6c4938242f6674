"""Device maps, meshes, shards of tensors, pytrees, building on meta, consistency of ranks."""
