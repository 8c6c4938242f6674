"""Whatever the files of the kernel hold, who reads them has an answer, and raises nothing."""

import os
import random

import pytest

from coordinator.failure import rank_view
from launcher.system import free_memory, host_addresses, linux
from launcher.system.oom_kills import OomKills

READERS = {
    "free memory": free_memory.free_memory_by_limit,
    "kills": lambda: OomKills().note(0),
    "ports": linux.ephemeral_ports,
    "processes": linux.processes,
    "handlers": lambda: linux.catches_signal(1, 15),
    "file system": lambda: linux.file_system(os.stat("/").st_dev),
    "addresses": host_addresses.ipv6_addresses,
    "use": lambda: rank_view._memory_and_processor(1),
}
NUMBER = "9" * 24
WORDS = ("", "0", "-1", "\u00b2", "max", NUMBER, "9" * 5000, "\0", "0::/a\0b", "\ufffd", "0:1 - x")
NAMES = ("oom_kill", "MemAvailable:", "SigCgt:", "file_dirty", "1:memory:/", "x x 8:1", "1 (a) S")


def hostile_texts():
    draw = random.Random(32)
    yield from WORDS
    for _ in range(300):
        words = [draw.choice(WORDS + NAMES) for _ in range(draw.randrange(60))]
        yield "".join(word + draw.choice(" \n:\t") for word in words)


@pytest.mark.parametrize("reader", READERS)
def test_what_the_kernel_would_not_write_raises_nothing(monkeypatch, reader):
    """A line without its number was an IndexError, of which nobody knew the file."""
    for text in hostile_texts():
        monkeypatch.setattr(linux, "read", lambda _, text=text: text)
        READERS[reader]()


def test_a_limit_that_is_no_number_of_the_kernel_limits_nothing(tmp_path):
    for limit, used in ((NUMBER, "1"), ("", "1"), ("\0", "1"), ("1000", NUMBER)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
        rests = free_memory.free_in_cgroups(tmp_path, "0::/a\0b\nnonsense\n").values()
        assert list(rests) == ([1000] if limit == "1000" else [])
