"""The token of a launch over machines: whoever knows it may join, as docs/security.md says.

token = LaunchToken.draw()
print(token)                         # 7M3K-0QZV-..., to be typed on the other machines
assert LaunchToken.parse(str(token).lower()) == token
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from launcher.authentication.credentials import Credentials
from launcher.launch_info import ENV_PREFIX
from launcher.system import linux

VARIABLE = ENV_PREFIX + "TOKEN"
OLD_VARIABLE = ENV_PREFIX + "SECRET"  # 64 hexadecimal digits, for every host; a token, too
VARIABLES = (VARIABLE, OLD_VARIABLE)
ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base32
LOOKS_LIKE = str.maketrans("ILO", "110")
NUM_DRAWN, NUM_CHECKED, GROUP = 26, 2, 4  # characters: 130 random bits, and 10 against a slip
NUM_HEX_DIGITS = 64
log = logging.getLogger("launcher")
MAX_FILE_NBYTES = 4096
ADVICE = (
    f"Give the token that the first machine has printed, at the prompt, by --token-file FILE or by "
    f"the variable {VARIABLE}."
)


@dataclass(frozen=True)
class LaunchToken:
    """A secret of at least 130 bits that people can carry from one machine to another.

    key: 32 bytes, of which nothing is ever sent. is_secret: False for that of --insecure, which
    everybody knows. text: as it was drawn; empty if it was not drawn here.
    """

    key: bytes = field(repr=False)
    is_secret: bool = True
    text: str = field(default="", repr=False, compare=False)

    @classmethod
    def draw(cls) -> LaunchToken:
        import secrets  # as hmac: not for a launch of one machine

        drawn = "".join(secrets.choice(ALPHABET) for _ in range(NUM_DRAWN))
        characters = drawn + _check_characters(drawn)
        groups = [characters[at : at + GROUP] for at in range(0, len(characters), GROUP)]
        return cls(cls.parse(characters).key, text="-".join(groups))

    @classmethod
    def parse(cls, text: str) -> LaunchToken:
        """The token that was typed: upper or lower case, with or without dashes and spaces.

        64 hexadecimal digits are one, too. The ValueError does not show the text.
        """
        characters = "".join(char for char in text if char not in "- \t\r\n")
        if len(characters) == NUM_HEX_DIGITS:
            try:
                return cls(bytes.fromhex(characters))
            except ValueError:
                pass
        characters = characters.upper().translate(LOOKS_LIKE)
        drawn, check = characters[:NUM_DRAWN], characters[NUM_DRAWN:]
        if len(characters) != NUM_DRAWN + NUM_CHECKED or not {*characters} <= {*ALPHABET}:
            raise ValueError(
                f"{len(characters)} characters are not a token, which has {NUM_DRAWN + NUM_CHECKED}"
                f" letters and digits (or {NUM_HEX_DIGITS} hexadecimal digits). {ADVICE}"
            )
        if check != _check_characters(drawn):
            raise ValueError(f"a character of the token is mistyped. {ADVICE}")
        return cls(hashlib.sha256(b"drumline, token\0" + drawn.encode()).digest())

    @classmethod
    def insecure(cls) -> LaunchToken:
        """The token of `--insecure`: it keeps nobody out, and nothing is encrypted by it."""
        return cls(hashlib.sha256(b"drumline, no token").digest(), is_secret=False)

    def __str__(self) -> str:
        return self.text

    def credentials(self) -> Credentials:
        """The credentials of nodes, which prove them to each other before any rank starts."""
        import hmac

        secret = hmac.digest(self.key, b"drumline, nodes of a launch", "sha256")
        return Credentials(secret, "over several nodes", 1, encrypts=self.is_secret)


def _check_characters(drawn: str) -> str:
    number = int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:2], "big")
    return ALPHABET[number >> 11] + ALPHABET[(number >> 6) & 31]


def take(environ: MutableMapping[str, str]) -> LaunchToken | None:
    """Take the token out of environ; None if there is none.

    Raises ValueError that names the variable.
    """
    for name, text in linux.remove_variables(environ, VARIABLES).items():
        try:
            return LaunchToken.parse(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return None


def read_file(path: str) -> LaunchToken:
    """The token in a file. Raises ValueError if others may read the file, or it holds none."""
    try:
        with linux.open_now(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_FILE_NBYTES).decode(errors="replace")
    except OSError as error:
        raise ValueError(f"--token-file {path}: {error.strerror}. {ADVICE}") from error
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        raise ValueError(
            f"--token-file {path} can be read by other users of this machine, who could join the "
            f"launch: `chmod 600 {path}` first, and draw a new token if they have."
        )
    try:
        return LaunchToken.parse(text)
    except ValueError as error:
        raise ValueError(f"--token-file {path}: {error}") from None


def write_file(path: str) -> LaunchToken:
    """Draw a token into a new file that only this user can read, and that is there whole."""
    token = LaunchToken.draw()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(f"{token}\n")
        except OSError:
            os.unlink(path)
            raise
    except OSError as error:
        raise ValueError(f"--token-file {path} cannot be written: {error.strerror}.") from error
    return LaunchToken(token.key)


def of_node(
    is_first: bool, path: str | None, is_insecure: bool | None, join_command: str = ""
) -> LaunchToken:
    """The token of a launch over several nodes: from the file, a variable, the terminal.

    On the first node one is drawn if there is none: into the file, or shown on the terminal, with
    join_command, the line to be typed on the others, which ask for it there. is_insecure: None of a
    command that has no --insecure. Raises ValueError where there is neither.
    """
    variable_token = take(os.environ)
    if is_insecure:
        log.warning(
            "--insecure: whoever reaches the port of this launch becomes a rank of it and hears "
            "what the ranks exchange, and nothing is encrypted there"
        )
        return LaunchToken.insecure()
    if path is not None:
        return write_file(path) if is_first and not os.path.exists(path) else read_file(path)
    if variable_token is not None:
        return variable_token
    if is_first and sys.stderr is not None and sys.stderr.isatty():
        token = LaunchToken.draw()
        print(_invitation(token, join_command), file=sys.stderr, flush=True)
        return token
    if not is_first and sys.stdin is not None and sys.stdin.isatty():
        return LaunchToken.parse(_typed())
    option = " --insecure goes without." * (is_insecure is not None)
    raise ValueError(
        "a launch over several machines needs a token, or whoever reaches its port could become a "
        f"rank, and nothing was started. Set {VARIABLE} or --token-file FILE to the same one on "
        "each (on the first, a FILE that is not there gets a new one), or start on a terminal, "
        f"which shows and asks for it.{option}"
    )


def _typed() -> str:
    """The line that is typed at the prompt, unseen; empty if it ends before, or is not text."""
    from getpass import getpass

    try:
        return getpass("token of the launch (as the first machine printed it): ")
    except (EOFError, UnicodeDecodeError):
        return ""


def _invitation(token: LaunchToken, join_command: str) -> str:
    return (
        f"[launcher] on each of the other machines type\n\n    {join_command}\n\nand give it this "
        f"token, which lets whoever has it join:\n\n    {token}\n"
    )
