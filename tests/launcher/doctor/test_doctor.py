"""`python -m launcher doctor`: what it finds, and what to type for it."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
import types
from collections import namedtuple

import pytest

from launcher import doctor, timings
from launcher.doctor import finding, gpu_checks, launcher_checks, layer_checks, machine_checks
from launcher.doctor.finding import Finding
from launcher.system import free_memory, gpus, linux


def test_exit_code_is_0_without_problems_and_json_has_the_findings(command):
    """Tests beside this one kill launchers, whose processes end a moment later."""
    (command.folder / "own").mkdir()
    deadline, is_passing = time.monotonic() + 30, True
    while is_passing and time.monotonic() < deadline:
        environ = {"TMPDIR": str(command.folder / "own")}
        ended = command.run("doctor", "--quick", "--json", env=environ)
        findings = [json.loads(line) for line in ended.out.splitlines()]
        problems = [finding for finding in findings if finding["ok"] is False]
        is_passing = [finding["name"] for finding in problems] == ["processes"]
    assert ended.code == bool(problems)
    names = {(finding["area"], finding["name"]) for finding in findings}
    assert {("software", "packages"), ("launchers", "mpiexec"), ("network", "interfaces")} <= names
    assert ended.code == 0, problems


def test_a_problem_is_followed_by_its_remedy():
    lines = list(finding.lines([Finding("limits", "files", False, "5", "ulimit -n 1024")]))
    assert lines == ["limits", "  WRONG  files: 5", "         -> ulimit -n 1024", "1 wrong"]


def test_a_check_that_raises_is_a_finding():
    def broken():
        raise OSError("gone")
        yield

    def after():
        yield Finding("after", "it", True, "seen")

    first, last = doctor.run_checks([broken, after])
    assert first.ok is False and "OSError: gone" in first.detail and last.detail == "seen"


def test_a_low_limit_of_open_files_names_ulimit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (64, 4096))
    findings = {finding.name: finding for finding in machine_checks.limits()}
    assert findings["open files"].ok is False and findings["open files"].remedy == "ulimit -n 1024"


def test_a_hard_limit_names_prlimit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (64, 64))
    findings = {finding.name: finding for finding in machine_checks.limits()}
    assert findings["open files"].remedy == "sudo prlimit --pid $$ --nofile=1024"


def test_too_little_shared_memory_is_a_problem(monkeypatch):
    space = namedtuple("space", "f_bavail f_frsize")(16, 1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    findings = {finding.name: finding for finding in machine_checks.memory()}
    assert findings["/dev/shm"].ok is False and "--shm-size" in findings["/dev/shm"].remedy


def test_too_little_memory_is_a_problem(monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory_nbytes", lambda: 100 << 20)
    findings = {finding.name: finding for finding in machine_checks.memory()}
    assert findings["available"].ok is False and findings["available"].remedy.startswith("ps ")


def test_forbidden_system_calls_are_a_problem(monkeypatch):
    def forbidden(name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    findings = {finding.name: finding for finding in machine_checks.software()}
    assert findings["system calls"].ok is False and "seccomp" in findings["system calls"].remedy


ORPHAN = """
import os, sys, time
from launcher.system import linux
if os.fork() == 0:
    linux.set_process_name("launch-test")
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    os.close(1)
    time.sleep(60)
"""


def test_an_orphaned_process_is_listed_with_kill():
    started = [sys.executable, "-c", ORPHAN]
    orphan = int(subprocess.run(started, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        processes = {finding.name: finding for finding in machine_checks.leftovers()}["processes"]
        parent = linux.process_stat(orphan).parent
        if parent != 1:
            pytest.skip(f"process {parent} takes in orphans here: runs where init does")
        assert processes.ok is False and str(orphan) in processes.remedy.split()
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize(("init", "ok"), [("python3\0-m\0launcher\0", True), ("jupyter", False)])
def test_what_a_launcher_that_is_process_1_has_started_is_no_orphan(monkeypatch, init, ok):
    """In a container, `kill` was advised for the fork server of a launch that ran."""
    child = linux.process_stat(os.getpid())._replace(parent=1)
    monkeypatch.setattr(linux, "processes", lambda: {os.getpid(): child})
    monkeypatch.setattr(linux, "process_name", lambda _: "launch-server")
    monkeypatch.setattr(linux, "read_proc", lambda path: init if path == "1/cmdline" else "")
    processes = {finding.name: finding for finding in machine_checks.leftovers()}["processes"]
    assert processes.ok is ok and bool(processes.remedy) is not ok


def test_folders_of_dead_launches_are_listed_and_of_running_ones_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    dead = tmp_path / "drumline-launch-4194304-x"  # one more than the highest pid there can be
    dead.mkdir()
    (tmp_path / f"drumline-trace-{os.getpid()}-y").mkdir()
    folders = next(machine_checks.leftovers())
    assert folders.ok is False and folders.remedy == f"rm -r {dead}"
    assert f"another container, if one shares {tmp_path}" in folders.detail  # a live one, there


def test_a_missing_package_names_pip_install(monkeypatch):
    monkeypatch.setattr(machine_checks, "REQUIRED", ("torch", "no-such-package"))
    findings = {finding.name: finding for finding in machine_checks.software()}
    assert findings["packages"].ok is False
    assert findings["packages"].remedy == "pip install no-such-package"


def test_a_missing_backend_launcher_is_no_problem(monkeypatch):
    monkeypatch.setattr(launcher_checks, "PATH", "/nowhere")
    assert {finding.ok for finding in launcher_checks.launchers() if finding.name != "mpi4py"} == {
        None
    }


def test_a_backend_launcher_of_another_python_is_no_problem(monkeypatch, tmp_path):
    """It used to be a fault of this machine, with nothing to type for it."""
    (tmp_path / "ray").write_text("#!/bin/sh\n")
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setattr(launcher_checks, "PATH", str(tmp_path))
    monkeypatch.setitem(launcher_checks.DISTRIBUTIONS, "ray", "no-such-package")
    (ray,) = [item for item in launcher_checks.launchers() if item.name == "ray"]
    assert ray.ok is None and ray.detail.startswith("of another Python")


def test_srun_without_a_cluster_is_no_problem(monkeypatch, tmp_path):
    (tmp_path / "srun").write_text(
        "#!/bin/sh\necho srun: fatal: DNS SRV lookup failed >&2; exit 1\n"
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setattr(launcher_checks, "PATH", str(tmp_path))
    (srun,) = [item for item in launcher_checks.launchers() if item.name == "srun"]
    assert srun.ok is None and "no slurm.conf" in srun.detail and "DNS" not in srun.detail


@pytest.mark.parametrize("program", ["#!/bin/sh\nexec sleep 60\n", "#!/no/such/shell\n", ""])
def test_a_backend_launcher_that_does_not_answer_hides_no_other(monkeypatch, tmp_path, program):
    """It was a fault of this machine, and the launchers behind it were not looked for."""
    (tmp_path / "mpiexec").write_text(program)
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setattr(launcher_checks, "PATH", str(tmp_path))
    own = dataclasses.replace(timings.TIMINGS, version_answer_s=0.2)
    monkeypatch.setattr(timings, "TIMINGS", own)
    findings = {item.name: item for item in launcher_checks.launchers()}
    assert findings.keys() == {*launcher_checks.LAUNCHERS, "mpi4py"}
    mpiexec = findings["mpiexec"]
    assert mpiexec.ok is None and "cannot be asked" in mpiexec.detail


def test_a_host_name_that_resolves_to_loopback_names_master_addr(monkeypatch):
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    host_name = layer_checks._host_name(["192.0.2.7"])
    assert host_name.ok is None and host_name.remedy.endswith("--master-addr 192.0.2.7")


@pytest.mark.parametrize(
    ("verdict", "ok"), [("conforms", True), ("fails", False), ("unusable", None)]
)
def test_the_verdict_of_each_backend_is_shown(monkeypatch, verdict, ok):
    answer = {"backends": {"acme": [verdict, "some detail"]}}
    monkeypatch.setattr(layer_checks, "_json_of", lambda *arguments: answer)
    (acme,) = layer_checks.backends()
    assert (acme.ok, acme.detail) == (ok, "some detail")
    assert bool(acme.remedy) == (ok is False)


def test_a_fast_path_that_does_not_happen_with_the_installed_transformers_is_shown(monkeypatch):
    paths = {"groups of rows": False, "merged caches": True}
    answer = {"transformers": "5.25.0", "read": ["5.23.0", "5.24.0"], "fast_paths": paths}
    monkeypatch.setattr(layer_checks, "installed_version", lambda name: "5.25.0")
    monkeypatch.setattr(layer_checks, "_json_of", lambda *arguments: answer)
    library, groups, merged = layer_checks.models()
    assert "5.25.0" in library.detail and "read: 5.23.0, 5.24.0" in library.detail
    assert groups.ok is False and groups.remedy == "pip install 'transformers==5.24.0'"
    assert merged.ok and not merged.remedy


def test_layers_that_cannot_be_imported_are_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (nccl,) = layer_checks.nccl()
    assert nccl.ok is False and "failed" in nccl.detail and nccl.remedy


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
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: level,
        "nvmlDeviceGetNvLinkState": no_link,
    }.items():
        setattr(nvml, name, answer)
    return nvml


def test_gpus_are_listed_with_memory_and_interconnect(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", driver(["GPU-a", "GPU-b"], 50))
    findings = {finding.name: finding for finding in gpu_checks.gpu_devices()}
    assert "80896 of 81920 MiB free" in findings["GPU-a"].detail
    assert findings["0 and 1"].detail == "across NUMA nodes"


def test_a_gpu_that_does_not_tell_its_memory_is_listed(monkeypatch, tmp_path):
    """Those with the memory of their host do not, and then nothing was known of any GPU."""
    nvml = driver(["GPU-a", "GPU-b"], 50)

    def unsupported(handle):
        raise nvml.NVMLError_NotSupported("Not Supported")

    nvml.nvmlDeviceGetMemoryInfo = unsupported
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    findings = {finding.name: finding for finding in gpu_checks.gpu_devices()}
    assert findings["GPU-a"].ok and "does not tell its memory" in findings["GPU-a"].detail
    assert findings["0 and 1"].detail == "across NUMA nodes"


def test_a_driver_that_does_not_answer_is_a_problem(monkeypatch, tmp_path):
    nvml = driver([], 50)

    def mismatched():
        raise nvml.NVMLError("Driver/library version mismatch")

    nvml.nvmlInit = mismatched
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (nvml_finding,) = gpu_checks.gpu_devices()
    assert nvml_finding.ok is False and "version mismatch" in nvml_finding.detail
    assert "nvidia-smi" in nvml_finding.remedy


def test_a_machine_without_a_gpu_driver_has_no_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "nothing")
    assert [finding.ok for finding in gpu_checks.gpu_devices()] == [None]
