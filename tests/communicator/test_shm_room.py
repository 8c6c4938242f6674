"""How much memory is left, as the kernel's files say: a program that reads copies of them."""

import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
PROGRAM = """
#include <cstdio>
#include "shm_room.h"
int main(int, char** args) {
    shm::Room room = shm::find_room(args[1]);
    std::printf("%llu %s", (unsigned long long)room.nbytes, room.bound);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("room")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [folder / "main.cpp", CSRC / "shm_room.cpp", CSRC / "shm_file.cpp"]
    command = ["c++", "-std=c++17", f"-I{CSRC}", *sources, "-o", folder / "room"]
    subprocess.run(command, check=True)
    return folder / "room"


@pytest.fixture
def room(program, tmp_path):
    """room({path: text}): the bytes that are left by these files, and what bounds them."""

    def find(files):
        for path, text in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        done = subprocess.run([program, tmp_path], capture_output=True, text=True, check=True)
        nbytes, _, bound = done.stdout.partition(" ")
        return int(nbytes), bound

    return find


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\n"}


def test_without_a_limit_it_is_what_the_machine_can_give(room):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert room({**MACHINE, **files}) == (5000 * 1024, "free on this machine")


def test_the_tightest_group_on_the_way_up_counts_without_its_cached_files(room):
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/memory.max": "3000000\n",
        "sys/fs/cgroup/outer/memory.current": "2500000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 300000\nactive_file 100000\n",
    }
    found = room({**MACHINE, **files})
    assert found == (3000000 - 2500000 + 400000, "left of the memory limit of this container")


def test_the_older_groups_count_too(room):
    files = {
        "proc/self/cgroup": "5:cpu,memory:/job\n0::/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000\n",
    }
    assert room({**MACHINE, **files}) == (0, "left of the memory limit of this container")


def test_a_system_that_says_nothing_bounds_nothing(room):
    nbytes, _ = room({})
    assert nbytes > 2**60
