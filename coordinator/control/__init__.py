"""The control server, its clients, heartbeats, the authenticated handshake, encryption, message framing."""
