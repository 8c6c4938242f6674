"""One rank of a launch misbehaves: `faulty.py FAULT RANK`, while the others wait for a minute."""

import os
import resource
import signal
import subprocess
import sys
import time

import launcher


def fork_a_daemon():
    """The classic double fork, in a session of its own, deaf to SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.closerange(0, 256)
            time.sleep(60)
        os._exit(0)
    time.sleep(0.2)


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run_out_of_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 32)


def flood_stderr():
    for _ in range(2000):
        os.write(2, b"x" * 4000 + b"\n")
    raise RuntimeError("after the flood")


def leave_children():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)


def print_without_an_end():
    print("no end of line", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def crash_while_others_are_deaf():
    time.sleep(0.3)
    os._exit(7)


FAULTS = {
    "raises": lambda: 1 / 0,
    "exits-3": lambda: sys.exit(3),
    "exits-with-a-message": lambda: sys.exit("nothing to train on"),
    "os-exit-9": lambda: os._exit(9),
    "os-exit-200": lambda: os._exit(200),
    "exits-minus-1": lambda: sys.exit(-1),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sigabrt": os.abort,
    "out-of-memory": run_out_of_memory,
    "import-error": lambda: __import__("no_such_module_anywhere"),
    "flood": flood_stderr,
    "no-end": print_without_an_end,
    "closes-its-files": lambda: (os.closerange(0, 256), sys.exit(5)),
    "daemonises": lambda: (fork_a_daemon(), sys.exit(4)),
    "leaves-children": lambda: (leave_children(), sys.exit(4)),
    "deaf-others": crash_while_others_are_deaf,
}

if __name__ == "__main__":
    fault, culprit = sys.argv[1], int(sys.argv[2])
    if fault == "deaf-others":
        ignore_sigterm()
    if launcher.current().rank == culprit:
        FAULTS[fault]()
    time.sleep(60)
