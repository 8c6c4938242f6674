"""Connections whose two ends prove a secret: handshake, encryption, framing of messages."""
