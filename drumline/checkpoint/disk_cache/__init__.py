"""Weights that came from another machine, kept on the disk of this one."""
