"""A switch that hands each frame on after a delay, for kernels without tc's netem.

    ip netns add a; ip netns add b; python -S -m tests.programs.slow_switch 20 a b

Each of these network namespaces gets an eth0, which is a TAP device of this process, as the
kernel's Documentation/networking/tuntap.rst has it, and goes away with it. Prints a line when they
are there. Frames are as large as the sender's segmentation offload made them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000  # of sched.h
PR_SET_PDEATHSIG = 1  # of prctl(2)
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # of if_tun.h, as are the flags
TAP_ALONE_WITH_LENGTHS = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
HEADER = 10  # bytes of a struct virtio_net_hdr, before the Ethernet frame
LARGEST = 1 << 17


def opened_tap(namespace: str, name: str) -> int:
    """A TAP device of that name in a network namespace, where this process stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_ALONE_WITH_LENGTHS))
    fcntl.ioctl(tap, TUNSETOFFLOAD, CHECKSUMS_AND_SEGMENTS)
    return tap


def serve(taps: list[int], delay_s: float) -> None:
    """Hand on what comes, to where its receiver was last heard of, or to all."""
    places: dict[bytes, int] = {}
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        left_s = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for tap in select.select(taps, [], [], left_s)[0]:
            frame = os.read(tap, LARGEST)
            receiver, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            places[sender] = tap
            waiting.append((time.monotonic() + delay_s, places.get(receiver, -tap), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, place, frame = waiting.popleft()
            for tap in [place] if place > 0 else [tap for tap in taps if tap != -place]:
                try:
                    os.write(tap, frame)
                except OSError:  # its interface is down, as a cable that is cut
                    continue


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    delay_ms, *namespaces = sys.argv[1:]
    taps = [opened_tap(namespace, "eth0") for namespace in namespaces]
    print("there", flush=True)
    serve(taps, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
