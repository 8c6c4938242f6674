"""One small module per launcher: reads its variables, starts its ranks."""
