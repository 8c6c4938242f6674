"""A call of a communicator: arguments, dtypes, checks, default implementations, failures."""
