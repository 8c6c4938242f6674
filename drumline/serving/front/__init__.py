"""The server's front: HTTP in a process that is not a rank, and that starts the ranks again."""
