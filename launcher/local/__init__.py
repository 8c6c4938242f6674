"""Ranks on this machine: supervisor, fork server, CPU affinity."""
