"""The work of rank 0: stand-ins, deferred calls, driver, micro-batches."""
