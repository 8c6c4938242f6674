"""The memory limit by the kernel's files: a program reads copies of them."""

import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"
PROGRAM = """
#include <cstdio>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include "system/memory_limit.h"
int posix_fallocate(int fd, off_t offset, off_t nbytes) {
    static int calls = 0;
    return calls++ == 0 ? EINTR : fallocate(fd, 0, offset, nbytes) == 0 ? 0 : errno;
}
int main(int, char** args) {
    shm::MemoryLimit limit = shm::find_memory_limit(args[1]);
    std::printf("%llu %s\\n", (unsigned long long)limit.available_bytes, limit.source);
    int fd = memfd_create("memory", 0);
    struct stat status;
    int error = shm::size_file_memory(fd, 1 << 20, &limit, args[1]);
    if (error == 0 && fstat(fd, &status) == 0)
        std::printf("%lld of %lld", status.st_blocks * 512LL, (long long)status.st_size);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory_limit")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [folder / "main.cpp", *sorted((CSRC / "system").glob("*.cpp"))]
    command = ["c++", "-std=c++17", f"-I{CSRC}", *sources, "-o", folder / "memory_limit"]
    subprocess.run(command, check=True)
    return folder / "memory_limit"


@pytest.fixture
def memory_limit(program, tmp_path):
    """memory_limit({path: text}): the available bytes by these files, and what sets the limit."""

    def find(files):
        for path, text in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        nbytes, _, source = run(program, tmp_path)[0].partition(" ")
        return int(nbytes), source

    return find


def run(program, folder):
    done = subprocess.run([program, folder], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\n"}


def test_without_a_group_limit_it_is_the_memory_available_on_the_machine(memory_limit):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert memory_limit({**MACHINE, **files}) == (5000 * 1024, "free on this machine")


def test_the_smallest_limit_of_the_parent_groups_counts_without_cached_files(memory_limit):
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/memory.max": "3000000\n",
        "sys/fs/cgroup/outer/memory.current": "2500000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 300000\nactive_file 100000\n",
    }
    limit = memory_limit({**MACHINE, **files})
    assert limit == (3000000 - 2500000 + 400000, "left within the memory limit of this container")


def test_control_groups_of_version_1_count_too(memory_limit):
    files = {
        "proc/self/cgroup": "5:cpu,memory:/job\n0::/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000\n",
    }
    limit = memory_limit({**MACHINE, **files})
    assert limit == (0, "left within the memory limit of this container")


def test_a_system_without_these_files_has_no_limit(memory_limit):
    nbytes, _ = memory_limit({})
    assert nbytes > 2**60


@pytest.mark.parametrize(("available_kb", "allocated"), [(20_000, 0), (10_000, 1 << 20)])
def test_pages_are_reserved_where_little_memory_is_available(
    program, tmp_path, available_kb, allocated
):
    """Although a signal interrupts it, as the program's posix_fallocate says."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {available_kb} kB\n")
    assert run(program, tmp_path)[1] == f"{allocated} of {1 << 20}"
