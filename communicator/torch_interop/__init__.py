"""`init_process_group("drumline")` and `torch.compile`."""
