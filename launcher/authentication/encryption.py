"""Encryption of a connection: its keys, from handshake and launch secret, and its socket."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.authentication.credentials import Credentials
from launcher.system.link_state import remote_host

if TYPE_CHECKING:
    from launcher._encryption import Stream

NONCE_NBYTES = 32
PIECE = 1 << 18  # of what is sent, which is copied

log = logging.getLogger("launcher")


def encryption_problem() -> str:
    """The reason why this process cannot encrypt; "" if it can."""
    from launcher._encryption import public_key

    try:
        public_key(bytes(NONCE_NBYTES))
    except (OSError, ValueError) as error:
        return f"{error}. Install OpenSSL 3 or 1.1.1 (libssl3, openssl-libs) on every host"
    return ""


class EncryptedSocket(socket.socket):
    """A connected socket whose bytes are encrypted. It takes over the plain one, and never blocks.

    keys: 32 bytes to send with, and 32 to receive with. After BlockingIOError, send() must be given
    the same bytes first. recv() raises OSError (EBADMSG) if what arrived was altered.
    """

    def __init__(self, plain: socket.socket, keys: bytes) -> None:
        from launcher._encryption import Stream

        super().__init__(fileno=plain.detach())
        self.setblocking(False)
        self._stream: Stream | None = Stream(self.fileno(), keys)
        self._unused_keys = keys

    def take_keys(self) -> bytes:
        """The keys, for who takes the descriptor: once, and before anything was sent or received.

        Whoever counted the records of a key anew would encrypt two of them with one nonce.
        """
        keys = self._unused_keys
        if not keys:
            raise ConnectionError("the keys of this connection are in use already")
        self._stream, self._unused_keys = None, b""
        return keys

    def _use(self) -> Stream:
        self._unused_keys = b""
        if self.fileno() < 0:  # the number may be that of another connection by now
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._stream is None:
            raise ConnectionError("the keys of this connection were given to another")
        return self._stream

    def send(self, data: Any, flags: int = 0, /) -> int:
        return self._use().send(bytes(memoryview(data)[:PIECE]))

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        return self.send(b"".join(memoryview(data)[:PIECE] for data in buffers))

    def recv(self, nbytes: int, flags: int = 0, /) -> bytes:
        if flags:
            self._refuse()
        try:
            return self._use().recv(nbytes)
        except OSError as error:
            if error.errno == errno.EBADMSG:
                log.error("connection with %s closed: %s", remote_host(self), error.strerror)
            raise

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view))
        view[: len(data)] = data
        return len(data)

    def pending(self) -> int:
        """The number of bytes that are here already, which select() does not know of."""
        return self._use().pending()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "an encrypted connection has send, sendmsg, recv and recv_into alone"
        )

    sendall = sendto = sendfile = makefile = _refuse
    recvmsg = recvmsg_into = recvfrom = recvfrom_into = dup = _refuse


class KeyExchange:
    """One end of a handshake. If the launch encrypts, its nonce is a public key (X25519).

    So who reads the wire, and later learns the launch secret, still has no key of the connection.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.nonce = self._private_key = os.urandom(NONCE_NBYTES)
        if credentials.encrypts:
            from launcher._encryption import public_key

            self.nonce = public_key(self._private_key)

    def encrypted(self, plain: socket.socket, peer_nonce: bytes, is_client: bool) -> socket.socket:
        """The socket to go on with, once both ends have proved themselves."""
        if not self._credentials.encrypts:
            return plain
        from launcher._encryption import shared_secret

        nonces = self.nonce + peer_nonce if is_client else peer_nonce + self.nonce
        shared = shared_secret(self._private_key, peer_nonce)
        of_client, of_server = self._credentials.connection_keys(shared, nonces)
        keys = of_client + of_server if is_client else of_server + of_client
        return EncryptedSocket(plain, keys)
