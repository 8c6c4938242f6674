"""A program that a rank runs keeps no socket of the launch, nor its secret, however it is run."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from communicator import Communicator
from coordinator import Coordinator
from launcher import linux
from tests.launcher.conftest import ROOT


def inheritable():
    """What a program started by os.system() would have open, beside the standard streams."""
    links = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and os.get_inheritable(fd):
                links.add(linux.link_of_fd(fd))
        except OSError:
            pass  # that of the listing
    return {link for link in links if link.startswith(("socket", "/memfd"))}


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo", "hybrid"])
def test_program_of_a_rank_inherits_no_socket_and_no_secret(ranks, backend):
    """Those of gloo stayed open in it, so that a dead rank's connections did not end."""
    before = inheritable()

    def body(info):
        with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend) as comm:
            comm.allreduce(torch.ones(4))
            peer = (comm.rank + 1) % 4
            sending = comm.isend(torch.ones(1), peer)
            comm.irecv(torch.ones(1), (comm.rank - 1) % 4).wait()
            sending.wait()
            coor.barrier()
            found = inheritable() - before
            coor.barrier()
            return found

    assert ranks(body, 4, nodes=[2, 2] if backend == "hybrid" else None) == [set()] * 4


def test_program_of_a_rank_in_a_new_interpreter_inherits_no_pipe_and_no_secret(tmp_path):
    """The descriptors that the fork server had got by exec stayed inheritable in its ranks."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
            import os, threading, time, launcher
            def work():
                os.system("ls -l /proc/self/fd > " + str(launcher.current().rank))
            if __name__ == "__main__":
                threading.Thread(target=time.sleep, args=(2,)).start()  # so it must not be forked
                import program
                launcher.launch(program.work, 2)
        """)
    )
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        listing = (tmp_path / str(rank)).read_text()
        assert "/proc/" in listing and "memfd" not in listing and "socket" not in listing, listing
