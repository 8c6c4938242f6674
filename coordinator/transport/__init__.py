"""The movement of bytes: node segment, tree between nodes, rendezvous, sockets for backends."""
