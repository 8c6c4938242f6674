"""Layers split over ranks: collectives with gradients, synchronised sampling and dropout."""
