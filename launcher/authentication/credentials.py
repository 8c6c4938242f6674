"""Credentials of a launch, equal at both ends of a connection: secret, launch id, world size."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

MAGIC = b"drumline"
VERSION = 7  # of the protocol
KEYS = b"drumline, keys of a connection"


@dataclass(frozen=True)
class Credentials:
    """The launch secret, and what is authenticated with it.

    encrypts: what passes on connections is encrypted.
    """

    secret: bytes = field(repr=False)
    launch_id: str
    world_size: int
    encrypts: bool = False

    def fingerprint(self) -> bytes:
        """Tells an honest client that it reached another launch; reveals nothing of the secret."""
        return hashlib.sha256(self._context()).digest()[:16]

    def mac(self, end: bytes, message: bytes, nonces: bytes) -> bytes:
        """The MAC of what one end sends.

        end: b"client" or b"server", so that no MAC can be sent back. message: all that this end
        sends but the MAC itself, and of the client's words their MAC.
        """
        import hmac  # a launch of one machine needs none of it, and starts without

        return hmac.digest(self.secret, end + self._context() + message + nonces, "sha256")

    def connection_keys(self, shared: bytes, nonces: bytes) -> tuple[bytes, bytes]:
        """The keys of a connection, the client's and the server's to send with (HKDF, RFC 5869).

        shared: what only the two ends of this connection know. nonces: the client's, the server's.
        """
        import hmac

        extracted = hmac.digest(self.secret, shared, "sha256")
        info = KEYS + self._context() + nonces
        of_client = hmac.digest(extracted, info + b"\1", "sha256")
        return of_client, hmac.digest(extracted, of_client + info + b"\2", "sha256")

    def _context(self) -> bytes:
        name = self.launch_id.encode()
        return struct.pack("!8sHQI", MAGIC, VERSION, self.world_size, len(name)) + name
