"""The control server, its clients, heartbeats, the authenticated handshake, message framing."""
