"""The server's front: HTTP in a process that is no rank, and that starts the ranks again."""
