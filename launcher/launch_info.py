"""LaunchInfo: the identity of a rank within its launch.

info = launcher.current()
print(info.rank, "of", info.world_size)
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

ENV_PREFIX = "DRUMLINE_"
TRACE = "trace"  # in extras: the folder for the recordings of ranks
ENCRYPT = "encrypt"  # in extras: of a launch with --encrypt
MASTER_RANK = "master_rank"  # in extras, where ranks met in a torch Store: that which serves
NODE_RANK = "node_rank"  # in extras: which node it is, where the ranks do not tell
LOG_LEVEL = ENV_PREFIX + "LOG_LEVEL"
TIME_SCALE = ENV_PREFIX + "TIME_SCALE"
PATIENCE = ENV_PREFIX + "PATIENCE"
CHOICE = ENV_PREFIX + "LAUNCHER"  # names the launcher to detect, where variables of several are set
ENCRYPT_VARIABLE = ENV_PREFIX + "ENCRYPT"  # by which a backend launcher's ranks learn of it
MAX_PORT = 65535
MAX_DIGITS = 18  # of a number; Python refuses to read one of thousands


class LaunchInfoError(ValueError):
    """A LaunchInfo that is incomplete or contradicts itself; the text has the values."""


@dataclass(frozen=True)
class LaunchInfo:
    """The facts that a rank knows about its launch before any communication.

    launch_id: the same on every rank of a launch, different in every other launch.
    world_size, rank: all ranks of the launch, and this one among them.
    local_world_size, local_rank: the ranks on this node, and this one among them.
    master_addr, master_port: where rank 0 listens. The port may be 0 if world_size is 1.
    extras: further facts from the launcher, string to string.

    Raises LaunchInfoError (a ValueError) if the values contradict each other.
    """

    launch_id: str
    world_size: int = 1
    local_world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    extras: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extras", MappingProxyType(dict(self.extras)))
        for problem in _problems(self):
            raise LaunchInfoError(f"{problem} (in {self})")

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self) -> tuple[Callable[[bytes], LaunchInfo], tuple[bytes]]:
        """Support copy.deepcopy, which cannot copy a mapping proxy."""
        return LaunchInfo.from_bytes, (self.to_bytes(),)

    @property
    def is_traced(self) -> bool:
        """True if this is a launch with --trace, where every rank records its calls."""
        return TRACE in self.extras

    @property
    def encrypts(self) -> bool:
        """True if this is a launch with --encrypt."""
        return ENCRYPT in self.extras

    @property
    def master_rank(self) -> int:
        """The rank that serves the others: rank 0, unless that is none of those that meet."""
        return int(self.extras.get(MASTER_RANK, "0"))

    @property
    def is_master(self) -> bool:
        """True on the rank that serves the others."""
        return self.rank == self.master_rank

    def to_dict(self) -> dict[str, object]:
        return {**vars(self), "extras": dict(self.extras)}

    def to_bytes(self) -> bytes:
        """UTF-8 JSON, of which from_bytes makes an equal LaunchInfo."""
        return json.dumps(self.to_dict(), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LaunchInfo:
        """The inverse of to_bytes. Raises LaunchInfoError for anything else."""
        try:
            values = json.loads(data)
            return cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise LaunchInfoError(f"not a LaunchInfo: {data[:200]!r}: {error}") from error

    def to_env(self) -> dict[str, str]:
        """Environment variables, each named DRUMLINE_ and the field in capitals."""
        values = self.to_dict()
        values["extras"] = json.dumps(values["extras"], sort_keys=True)
        return {ENV_PREFIX + name.upper(): str(value) for name, value in values.items()}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchInfo | None:
        """The LaunchInfo that to_env wrote there, or None if none of its variables is set.

        Raises LaunchInfoError, with names and values, if only some are set or one makes no sense.
        """
        names = {f.name: ENV_PREFIX + f.name.upper() for f in fields(cls)}
        texts = {name: environ[variable] for name, variable in names.items() if variable in environ}
        if not texts:
            return None
        missing = [variable for name, variable in names.items() if name not in texts]
        if missing:
            present = shown({names[name]: text for name, text in texts.items()})
            raise LaunchInfoError(
                f"an incomplete LaunchInfo in the environment: {', '.join(missing)} not set, but "
                f"{present}. Unset them all, or start through `python -m launcher run`."
            )
        return _parse(texts, names)


def _parse(texts: Mapping[str, str], names: Mapping[str, str]) -> LaunchInfo:
    values: dict[str, object] = {**texts, "extras": None}
    for name in ("world_size", "local_world_size", "rank", "local_rank", "master_port"):
        values[name] = integer(texts[name], names[name])
    with contextlib.suppress(ValueError, RecursionError):
        values["extras"] = json.loads(texts["extras"])
    if not isinstance(values["extras"], dict):
        raise LaunchInfoError(f"{names['extras']}={texts['extras'][:99]!r} is not a JSON object")
    return LaunchInfo(**values)  # type: ignore[arg-type]


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for an error: the beginning of each value."""
    return {name: text[:99] for name, text in variables.items()}


def integer(text: str, variable: str) -> int:
    """The value of a plain decimal number; the error names the variable."""
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        raise LaunchInfoError(f"{variable}={text[:99]!r} is not a number")
    return int(text)


def number(text: str) -> float:
    """The number that is written there; NaN, which no comparison lets pass, for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _problems(info: LaunchInfo) -> Iterator[str]:
    """The contradictions in info, in words; wrong types first, as the rest compares values."""
    for name in ("world_size", "local_world_size", "rank", "local_rank", "master_port"):
        if type(value := getattr(info, name)) is not int:
            yield f"{name} must be an integer, not {value!r}"
    for name in ("launch_id", "master_addr"):
        if not (isinstance(value := getattr(info, name), str) and value):
            yield f"{name} must be a non-empty string"
        elif value != value.encode(errors="ignore").replace(b"\0", b"").decode():
            yield f"{name}={value[:99]!r} must be UTF-8 and have no NUL in it"
    if info.world_size < 1:
        yield "world_size must be at least 1"
    if not 0 <= info.rank < info.world_size:
        yield "rank must be in [0, world_size)"
    if not 1 <= info.local_world_size <= info.world_size:
        yield "local_world_size must be in [1, world_size]"
    if not 0 <= info.local_rank < info.local_world_size:
        yield "local_rank must be in [0, local_world_size)"
    if not 0 <= info.master_port <= MAX_PORT:
        yield f"master_port must be in [0, {MAX_PORT}]"
    if info.master_port == 0 and info.world_size > 1:
        yield "master_port 0 is only for world_size 1"
    if not all(isinstance(text, str) for pair in info.extras.items() for text in pair):
        yield "extras must map strings to strings"
