"""Free memory by the files of control groups."""

import os
import subprocess
import sys
from pathlib import Path

from launcher.system.free_memory import free_in_cgroups


def cgroup(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def free(root, own):
    return sorted(free_in_cgroups(root, own).values())


def test_the_tightest_cgroup_above_the_process_counts(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_current=300)
    cgroup(tmp_path / "a" / "b", memory_max="max", memory_current=200)
    assert free(tmp_path, "0::/a/b\n") == [700]


def test_page_cache_that_the_kernel_can_give_back_is_free(tmp_path):
    """The same command was refused in the same cgroup the second time: by then the model's own
    pages, read twice, were active."""
    cgroup(tmp_path / "a", memory_max=1000, memory_current=900)
    stat = "anon 100\nactive_file 300\ninactive_file 500\nfile_mapped 400\n"
    (tmp_path / "a" / "memory.stat").write_text(stat)
    assert free(tmp_path, "0::/a\n") == [900]


def test_page_cache_that_must_be_written_first_is_not(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_current=900)
    stat = "inactive_file 500\nunevictable 200\nfile_dirty 60\nfile_writeback 40\n"
    (tmp_path / "a" / "memory.stat").write_text(stat)
    assert free(tmp_path, "0::/a\n") == [500]


def test_a_cgroup_is_not_filled_to_where_its_processes_are_slowed_down(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_high=700, memory_current=300)
    assert free(tmp_path, "0::/a\n") == [400]


def test_a_cgroup_of_the_first_version_counts_too(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert free(tmp_path, "") == [4000]
    own = tmp_path / "memory" / "a"
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text("2000")
    (own / "memory.usage_in_bytes").write_text("500")
    (own / "memory.stat").write_text("active_file 10\ntotal_active_file 200\ntotal_dirty 100\n")
    lines = "5:devices:/b\n4:cpu,memory:/a\n0::/\n"
    assert free(tmp_path, lines) == [1600, 4000]


def test_cgroups_have_names_of_their_own(tmp_path):
    for name in ("a", "b"):
        cgroup(tmp_path / name, memory_max=1000, memory_current=0)
    names = [set(free_in_cgroups(tmp_path, f"0::/{name}\n")) for name in ("a", "b", "a")]
    assert names[0] == names[2] != names[1]


SECOND_START = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
group, file = Path(sys.argv[1]), Path(sys.argv[2])
(group / "cgroup.procs").write_text("0")
from launcher import free_memory_nbytes
before = free_memory_nbytes()
for _ in range(2):
    with open(file, "rb") as stream:
        while stream.read(1 << 20):
            pass
print(before, free_memory_nbytes())
"""


def test_a_second_start_in_a_cgroup_finds_as_much_memory_as_the_first(tmp_path, memory_group):
    """Files that were read twice stay in memory as active pages, and counted as used."""
    nbytes = 64 << 20
    (tmp_path / "weights").write_bytes(bytes(nbytes))
    os.sync()
    os.posix_fadvise(descriptor := os.open(tmp_path / "weights", 0), 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", SECOND_START, memory_group, tmp_path / "weights", root]
    starts = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    found = [int(number) for start in starts for number in start.stdout.split()]
    assert max(found) - min(found) < nbytes // 4
    assert max(found) <= 256 << 20
