"""The control server, its clients, heartbeats, the handshake, encryption, message framing."""
