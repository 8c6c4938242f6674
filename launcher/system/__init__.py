"""Facts from Linux: `/proc`, signals, GPUs by UUID, enclosing launchers."""
