"""`python -m launcher doctor`: what it finds, and what to type for it."""

import json
import os
import resource
import signal
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest

from launcher import doctor
from launcher.doctor import gpu_checks, launcher_checks, layer_checks, machine_checks
from launcher.doctor.finding import Finding
from launcher.system import gpus


def test_it_ends_with_0_where_nothing_is_wrong_and_json_says_the_same(command):
    (command.folder / "own").mkdir()
    ended = command.run("doctor", "--quick", "--json", env={"TMPDIR": str(command.folder / "own")})
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert ended.code == any(one["ok"] is False for one in found)
    names = {(one["area"], one["name"]) for one in found}
    assert {("software", "packages"), ("engines", "mpiexec"), ("network", "interfaces")} <= names
    assert ended.code == 0, [one for one in found if one["ok"] is False]


def test_a_fault_is_followed_by_the_line_to_type():
    told = list(doctor.lines([Finding("limits", "files", False, "5", "ulimit -n 1024")]))
    assert told == ["limits", "  WRONG  files: 5", "         -> ulimit -n 1024", "1 wrong"]


def test_a_look_that_fails_is_a_finding_and_not_the_end():
    def broken():
        raise OSError("gone")
        yield

    def after():
        yield Finding("after", "it", True, "seen")

    first, last = doctor.examine([broken, after])
    assert first.ok is False and "OSError: gone" in first.found and last.found == "seen"


def test_few_open_files_are_told_with_the_command_that_raises_them(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (64, 4096))
    found = {one.name: one for one in machine_checks.limits()}
    assert found["open files"].ok is False and found["open files"].remedy == "ulimit -n 1024"


def test_a_limit_that_only_root_can_raise_is_told_so(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (64, 64))
    found = {one.name: one for one in machine_checks.limits()}
    assert found["open files"].remedy == "sudo prlimit --pid $$ --nofile=1024"


def test_little_shared_memory_is_a_fault(monkeypatch):
    space = namedtuple("space", "f_bavail f_frsize")(16, 1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    found = {one.name: one for one in machine_checks.memory()}
    assert found["/dev/shm"].ok is False and "--shm-size" in found["/dev/shm"].remedy


def test_little_memory_is_a_fault(monkeypatch):
    monkeypatch.setattr(machine_checks, "_available_mib", lambda: 100)
    found = {one.name: one for one in machine_checks.memory()}
    assert found["available"].ok is False and found["available"].remedy.startswith("ps ")


def test_a_container_that_forbids_what_launches_need_is_a_fault(monkeypatch):
    def forbidden(name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    found = {one.name: one for one in machine_checks.software()}
    assert found["system calls"].ok is False and "seccomp" in found["system calls"].remedy


ORPHAN = """
import os, sys, time
from launcher import linux
if os.fork() == 0:
    linux.name_process("launch-test")
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    os.close(1)
    time.sleep(60)
"""


def test_a_process_that_has_outlived_its_launcher_is_told_with_how_to_end_it():
    started = [sys.executable, "-c", ORPHAN]
    orphan = int(subprocess.run(started, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        told = {one.name: one for one in machine_checks.left_behind()}["processes"]
        parent = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]
        if parent != "1":
            pytest.skip(f"process {parent} takes in orphans here: runs where init does")
        assert told.ok is False and str(orphan) in told.remedy.split()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_folders_of_dead_launches_are_told_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    dead = tmp_path / "drumline-launch-4194304-x"  # one more than the highest pid there can be
    dead.mkdir()
    (tmp_path / f"drumline-trace-{os.getpid()}-y").mkdir()
    found = next(machine_checks.left_behind())
    assert found.ok is False and found.remedy == f"rm -r {dead}"


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(machine_checks, "NEEDED", ("torch", "no-such-package"))
    found = {one.name: one for one in machine_checks.software()}
    assert found["packages"].ok is False
    assert found["packages"].remedy == "pip install no-such-package"


def test_an_engine_that_is_not_there_is_no_fault(monkeypatch):
    monkeypatch.setattr(launcher_checks, "PATH", "/nowhere")
    assert {one.ok for one in launcher_checks.engines() if one.name != "mpi4py"} == {None}


def test_an_engine_of_another_python_is_told_in_words_and_is_no_fault(monkeypatch, tmp_path):
    """It used to be a fault of this machine, with nothing to type for it."""
    (tmp_path / "ray").write_text("#!/bin/sh\n")
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setattr(launcher_checks, "PATH", str(tmp_path))
    monkeypatch.setitem(launcher_checks.DISTRIBUTIONS, "ray", "no-such-package")
    (found,) = [one for one in launcher_checks.engines() if one.name == "ray"]
    assert found.ok is None and found.found.startswith("of another Python")


def test_an_srun_of_no_cluster_is_told_in_words_and_is_no_fault(monkeypatch, tmp_path):
    (tmp_path / "srun").write_text(
        "#!/bin/sh\necho srun: fatal: DNS SRV lookup failed >&2; exit 1\n"
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setattr(launcher_checks, "PATH", str(tmp_path))
    (found,) = [one for one in launcher_checks.engines() if one.name == "srun"]
    assert found.ok is None and "no slurm.conf" in found.found and "DNS" not in found.found


def test_an_address_is_advised_where_the_name_of_the_host_is_its_loopback(monkeypatch):
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    told = layer_checks._host_name(["192.0.2.7"])
    assert told.ok is None and told.remedy.endswith("--master-addr 192.0.2.7")


@pytest.mark.parametrize(
    ("verdict", "ok"), [("conforms", True), ("fails", False), ("unusable", None)]
)
def test_a_backend_is_shown_as_its_check_ended(monkeypatch, verdict, ok):
    told = {"backends": {"acme": [verdict, "as it said"]}}
    monkeypatch.setattr(layer_checks, "_ask", lambda *arguments: told)
    (found,) = layer_checks.backends()
    assert (found.ok, found.found) == (ok, "as it said")
    assert bool(found.remedy) == (ok is False)


def test_floors_that_do_not_import_are_a_fault_with_the_last_line_they_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (found,) = layer_checks.nccl()
    assert found.ok is False and "failed" in found.found and found.remedy


def driver(uuids, level):
    """What pynvml would be on a machine with these GPUs, no two closer than level."""

    class NVMLError(Exception):
        pass

    def no_link(handle, link):
        raise NVMLError

    memory = namedtuple("memory", "total free")(80 << 30, 79 << 30)
    nvml = types.ModuleType("pynvml")
    nvml.NVML_DEVICE_MIG_ENABLE = 1
    nvml.NVMLError = nvml.NVMLError_NotSupported = NVMLError
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: uuids[handle],
        "nvmlDeviceGetName": lambda handle: "a GPU",
        "nvmlDeviceGetMigMode": lambda handle: (0, 0),
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: level,
        "nvmlDeviceGetNvLinkState": no_link,
    }.items():
        setattr(nvml, name, answer)
    return nvml


def test_gpus_are_told_by_uuid_with_memory_and_what_lies_between(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", driver(["GPU-a", "GPU-b"], 50))
    found = {one.name: one for one in gpu_checks.gpu_devices()}
    assert "80896 of 81920 MiB free" in found["GPU-a"].found
    assert found["0 and 1"].found == "across NUMA nodes"


def test_a_driver_that_does_not_answer_is_a_fault_in_its_own_words(monkeypatch, tmp_path):
    nvml = driver([], 50)

    def mismatched():
        raise nvml.NVMLError("Driver/library version mismatch")

    nvml.nvmlInit = mismatched
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (found,) = gpu_checks.gpu_devices()
    assert found.ok is False and "version mismatch" in found.found and "nvidia-smi" in found.remedy


def test_a_machine_without_a_driver_has_no_gpu_and_that_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "nothing")
    assert [one.ok for one in gpu_checks.gpu_devices()] == [None]
