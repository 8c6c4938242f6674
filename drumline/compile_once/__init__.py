"""Programs compiled on one rank, moved to each rank's device, cached on disk."""
