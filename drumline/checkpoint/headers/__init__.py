"""Headers of files that anyone may have written, and the bounds of their fields."""
