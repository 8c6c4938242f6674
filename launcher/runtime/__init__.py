"""One rank's process, its output, its end, and the choice of the first failure."""
