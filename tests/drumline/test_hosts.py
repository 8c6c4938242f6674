"""One model over two hosts, with 2 ranks and 1, under an engine: the tokens of one process.

Under torchrun: test_cli.py, test_the_commands_for_two_machines_run_as_printed.
"""

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BIN = Path(sys.executable).parent
PROMPT = list(range(3, 12))
RANK = f"""
import json, sys
import torch
import drumline
from communicator import Communicator
from coordinator import Coordinator

def main(path):
    torch.set_num_threads(1)
    with Coordinator(timeout_s=60) as coor:
        memory = [1 << 30] * coor.world_size
        with drumline.load(path, "balanced", coor, max_memory=memory) as model:
            prompt = torch.tensor([{PROMPT}])
            tokens = model.generate(prompt, max_new_tokens=12, do_sample=False)
            ranks, nodes = model.device_map.ranks, [len(node) for node in coor.nodes]
    return [tokens.tolist(), ranks, nodes]

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
"""
DRIVER = """
import sys
import ray_ranks, launcher, ray
ray.init(address="10.77.0.1:6379", log_to_driver=False)
print(launcher.launch(ray_ranks.main, nprocs=3, launcher="ray", args=sys.argv[1:], timeout_s=90)[0])
"""


@pytest.fixture(scope="module")
def expected(checkpoints):
    """What one process says, and where the layers are to be."""
    plain, path = checkpoints.llama()
    tokens = plain.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    return str(path), [tokens.tolist(), [0, 1, 2], [2, 1]]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "ray_ranks.py"
    path.write_text(RANK)
    return path


@pytest.mark.soak
def test_mpi(hosts, expected, script):
    if not (BIN / "mpiexec.hydra").exists():
        pytest.skip("no MPICH: runs on Linux (x86-64, arm64) after `pip install mpich`")
    path, said = expected
    how = ["-launcher", "ssh", "-launcher-exec", str(hosts.remote_shell)]
    where = ["-hosts", "10.77.0.1:2,10.77.0.2:1", "-n", "3"]
    command = [BIN / "mpiexec.hydra", *how, *where, sys.executable, script, path]
    out = hosts.run(command, MASTER_ADDR="10.77.0.1", LAUNCH_ID="wednesday")
    assert json.loads(out) == said


@pytest.fixture
def ray_cluster(hosts, script):
    """A node of 2 CPUs on one host, and of 1 on the other, each until its process is ended."""
    pytest.importorskip("ray", reason="runs after `pip install ray`")
    start = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats"]
    head = ["--head", "--port", "6379", "--num-cpus", "2", "--include-dashboard", "false"]
    more = ["--address", "10.77.0.1:6379", "--num-cpus", "1"]
    environ = {
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{script.parent}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    nodes = []
    try:
        for host, options in enumerate((head, more)):
            at = ["--node-ip-address", f"10.77.0.{host + 1}"]
            nodes.append(hosts.start(host, [*start, *options, *at], **environ))
            for line in nodes[-1].stdout:
                if "Ray runtime started" in line:
                    break
        yield environ
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            try:
                node.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                node.kill()


@pytest.mark.soak
def test_ray(hosts, expected, script, ray_cluster):
    path, said = expected
    driver = script.with_name("driver.py")
    driver.write_text(DRIVER)
    out = hosts.run([sys.executable, driver, path], **ray_cluster)
    assert json.loads(out.splitlines()[-1]) == said
