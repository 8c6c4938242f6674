"""Free memory by the files of control groups."""

from launcher.system.free_memory import free_in_cgroups


def cgroup(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_the_tightest_cgroup_above_the_process_counts(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_current=300)
    cgroup(tmp_path / "a" / "b", memory_max="max", memory_current=200)
    assert min(free_in_cgroups(tmp_path, "0::/a/b\n")) == 700


def test_page_cache_that_the_kernel_can_give_back_is_free(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_current=900)
    (tmp_path / "a" / "memory.stat").write_text("anon 400\ninactive_file 500\n")
    assert list(free_in_cgroups(tmp_path, "0::/a\n")) == [600]


def test_a_cgroup_of_the_first_version_counts_too(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert list(free_in_cgroups(tmp_path, "")) == [4000]
    own = tmp_path / "memory" / "a"
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text("2000")
    (own / "memory.usage_in_bytes").write_text("500")
    lines = "5:devices:/b\n4:cpu,memory:/a\n0::/\n"
    assert sorted(free_in_cgroups(tmp_path, lines)) == [1500, 4000]
