"""The failure detector, the state of each peer, stack dumps."""
