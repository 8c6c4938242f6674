"""Records that cross pipes between launcher and ranks."""
