"""The backends: plugins that speak the C header, `tcp`, `gloo`, `mpi`, `hierarchical`, NCCL."""
