"""Messages that start when they are called: isend, irecv, and those of torch.distributed."""
