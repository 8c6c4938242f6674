"""Every call of a Coordinator in which ranks wait for another, all at once: a thread and a
Coordinator for each. The victim makes none of them, but enters the turns that it has."""

import contextlib
import threading
import time

from coordinator import Coordinator, CoordinatorError, CoordinatorTimings

LARGE = 3_000_000
COLLECTIVE = {
    "barrier": lambda coor: coor.barrier(),
    "local_barrier": lambda coor: coor.local_barrier(),
    "broadcast": lambda coor: coor.broadcast(b"x" * 100, 0),
    "broadcast object": lambda coor: coor.broadcast_object([1], 1),
    "allgather": lambda coor: coor.allgather(b"x"),
    "allgather large": lambda coor: coor.allgather(bytes(LARGE)),
    "gather": lambda coor: coor.gather(b"x" * 10, 1),
    "scatter": lambda coor: coor.scatter([b"x"] * coor.world_size if coor.rank == 1 else None, 1),
    "agree": lambda coor: coor.agree("same"),
    "all_true": lambda coor: coor.all_true(True),
}
MEETING = {"split": lambda coor: coor.split(range(coor.world_size))}
WAITING = {"wait": lambda coor: coor.wait("what nobody puts")}
TURNS = {
    "once": lambda coor, body: coor.once("work", body),
    "master_first": lambda coor, body: _first(coor.master_first(), body),
    "local_master_first": lambda coor, body: _first(coor.local_master_first(), body),
}
CALLS = [*COLLECTIVE, *MEETING, *WAITING, *TURNS]


def _first(turn, body):
    with turn:
        body()


def waits_for(name, coor, victim):
    """Does this rank wait for the victim in this call?"""
    is_here = victim in coor.nodes[coor.node_index]
    if name == "master_first":
        return victim == 0
    if name == "local_master_first":
        return is_here and victim == coor.nodes[coor.node_index][0]
    return is_here or name not in ("once", "local_barrier")


def make(name, coor):
    if name in TURNS:
        TURNS[name](coor, lambda: b"")
    else:
        {**COLLECTIVE, **MEETING, **WAITING}[name](coor)


def outcome(name, coor):
    """What came of the call: the error and its text, and how long it took and ended when."""
    since, error, text = time.monotonic(), "", ""
    try:
        make(name, coor)
    except CoordinatorError as raised:
        error, text = type(raised).__name__, str(raised)
    return [error, text, time.monotonic() - since, time.time()]


def together(bodies):
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def fall(name, coor, fault, has_begun):
    """The victim's side: in its turn, where it has one."""

    def begin():
        has_begun.set()
        fault(coor)

    with contextlib.suppress(Exception), coor:
        if name in TURNS and waits_for(name, coor, coor.rank):
            TURNS[name](coor, begin)
        else:
            begin()


def begun(coors, fault, only_turns):
    """The threads of the victim, once each is at its fault."""
    names = [name for name in coors if name in TURNS or not only_turns]
    events = {name: threading.Event() for name in names}
    threads = together(
        [lambda name=name: fall(name, coors[name], fault, events[name]) for name in names]
    )
    assert all(event.wait(20) for event in events.values())
    return threads


def made(info, names=CALLS, transport=None, **timings):
    """A Coordinator for each call, on which all ranks have met."""
    options = {"timings": CoordinatorTimings(**timings), "transport": transport}
    coors = {name: Coordinator(info, timeout_s=20, **options) for name in names}
    for coor in coors.values():
        coor.local_barrier()
        coor.barrier()
    return coors


def waited(coors, victim, timeout_s, meet_survivors=lambda: None):
    """The outcomes of the calls that wait for the victim, by name, all made at once.

    meet_survivors: for who closes is not an excuse for who is still waiting.
    """
    results = {}
    for coor in coors.values():
        coor.timeout_s = timeout_s
    waiting = {name: coor for name, coor in coors.items() if waits_for(name, coor, victim)}
    threads = together(
        [
            lambda name=name, coor=coor: results.update({name: outcome(name, coor)})
            for name, coor in waiting.items()
        ]
    )
    for thread in threads:
        thread.join()
    meet_survivors()
    for coor in coors.values():
        with contextlib.suppress(CoordinatorError):
            coor.close(timeout_s=0.3)
    return results


def run(info, names, victim, fault, timeout_s, whole=None, meet_survivors=lambda: None, **timings):
    """On a rank: the outcomes of its calls by name. The victim: fault(coor) in each of them, at the
    same time; or whole() for the whole process, which then stays within its turns."""
    coors = made(info, names, **timings)
    threads = []
    with Coordinator(info, timeout_s=20) as ready:
        if info.rank == victim:
            stay = lambda _: time.sleep(60)  # noqa: E731
            threads = begun(coors, stay if whole else fault, only_turns=whole is not None)
        ready.barrier()  # the others begin once the victim has taken its turns
    if info.rank != victim:
        return waited(coors, victim, timeout_s, meet_survivors)
    if whole is not None:
        whole()
        return {}
    for thread in threads:
        thread.join()
    return {}
