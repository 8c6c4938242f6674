"""The end of a server, after the master's."""

import signal
import subprocess
import threading
from types import SimpleNamespace

from coordinator.peers import Peer, boot_id, start_ticks
from drumline.strategies.serve_stage import exit_after_master


def test_a_server_that_ends_with_a_failure_lets_the_master_end_first():
    """The launcher shows the first failure, and that was a server's, which had none of its own."""
    with subprocess.Popen(["sleep", "60"]) as process:
        master = Peer(0, 0, 2, "here", boot_id(), process.pid, start_ticks(process.pid) or 0)
        coor = SimpleNamespace(peers=[master], rank=1)
        exit_after_master(coor, 0)
        assert process.poll() is None
        thread = threading.Timer(0.3, process.kill)
        thread.start()
        exit_after_master(coor, 1)  # the process is a zombie by then: nobody has waited for it
        assert process.wait() == -signal.SIGKILL
        thread.join()
