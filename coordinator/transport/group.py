"""How the bytes of a collective call travel: memory within a node, connections between nodes."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import coordinator._node_shm as _node_shm
from coordinator.call_site import Call, Waiting
from coordinator.control.framing import Late, pack, unpack
from coordinator.control.session import Session
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.failure.detector import FailureDetector
from coordinator.peers import Peer, group_by_node
from coordinator.transport.rendezvous import Meetings
from coordinator.transport.tree import (
    EVERYWHERE,
    Door,
    EdgeBroken,
    Entry,
    Tree,
    children_of,
    climb,
    parent_of,
)

SLICE_S = 0.05  # of waiting, after which we look who is still alive
JOIN_PART = 0.8  # of the time to join, for connections: the rest is to hear who could not
EDGE_S = 5.0  # beyond the deadline, for connections to be broken by nothing but what breaks them
EVERYBODY = -1

log = logging.getLogger("coordinator")


class Group:
    """The ranks of a group, joined. Collective throughout."""

    def __init__(self, key: str, session: Session, rank: int, size: int) -> None:
        self.key, self.session, self.rank, self.size = key, session, rank, size
        self.peers: tuple[Peer, ...] = ()
        self._last = ("start", 0, "", time.monotonic())
        self._board: _node_shm.Board | None = None
        self._tree: Tree | None = None
        session.watch(self)

    def row(self) -> tuple[str, int, str, float]:
        """The call this rank was last seen in, and how long ago that was."""
        name, number, where, since = self._last
        return name, number, where, time.monotonic() - since

    # ---- joining ----

    def join(
        self, me: Peer, members: Sequence[int], parent: FailureDetector | None, call: Waiting
    ) -> None:
        """Meet the members (ranks of the launch), and connect to them.

        parent: looks after a group that has all of them. call: in which this happens.
        """
        self._meetings = Meetings(self.key, self.session, members, parent, call)
        self._joining = call
        given = self._meet("peers", me.to_json().encode())
        self.peers = tuple(Peer.from_json(data) for data in given)
        self.detector = FailureDetector(self.key, self.session, self.rank, self.peers)
        self.islands = self._share_memory(_islands(self.peers))
        self._index = next(i for i, island in enumerate(self.islands) if self.rank in island)
        self.island = self.islands[self._index]
        self._island_of = {rank: i for i, island in enumerate(self.islands) for rank in island}
        self.session.get_to_know(self._neighbour(), self.peers)
        if len(self.islands) > 1:
            self.session.begin_beating()
            self._connect()

    def _meet(self, name: str, data: bytes) -> list[bytes]:
        """What every rank gives. Collective."""
        return self._meetings.meet(name, data)

    def _share_memory(self, islands: list[list[int]]) -> list[list[int]]:
        """Attach to the memory of each island. Where that fails, its ranks become islands."""
        if all(len(island) == 1 for island in islands):
            return islands
        mine = next(island for island in islands if self.rank in island)
        fd, offer = self._offer(mine)
        try:
            given = [unpack(data) for data in self._meet("memory", offer)]
            problem = self._attach(mine, given)
            told = self._meet("attached", problem.encode())
        finally:
            if fd >= 0:
                os.close(fd)
        return self._without_broken(islands, [data.decode() for data in told])

    def _offer(self, island: list[int]) -> tuple[int, bytes]:
        """Fresh memory, if this rank is to make it; and what the others need to know."""
        cores = sorted(os.sched_getaffinity(0))
        if self.rank != island[0] or len(island) == 1:
            return -1, pack((-1, "", cores))
        try:
            fd = _node_shm.create(len(island))
        except OSError as error:
            return -1, pack((-1, f"{error.strerror}", cores))
        return fd, pack((fd, "", cores))

    def _attach(self, island: list[int], given: list[Any]) -> str:
        """Why this rank cannot share memory; nothing if it does."""
        if len(island) == 1:
            return ""
        fd, problem, _ = given[island[0]]
        cores = {core for rank in island for core in given[rank][2]}
        if problem:
            return str(problem)
        try:
            own = os.open(f"/proc/{self.peers[island[0]].pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return str(error)
        try:
            place, may_spin = island.index(self.rank), len(cores) >= len(island)
            self._board = _node_shm.Board(own, len(island), place, may_spin)
        except OSError as error:
            return str(error)
        finally:
            os.close(own)
        self.detector.share(island, self._board)
        return ""

    def _without_broken(self, islands: list[list[int]], told: list[str]) -> list[list[int]]:
        found = []
        for island in islands:
            problems = [f"{self.peers[rank]}: {told[rank]}" for rank in island if told[rank]]
            found += [[rank] for rank in island] if problems else [island]
            if problems and self.rank in island:
                self._board = None
                self.detector = FailureDetector(self.key, self.session, self.rank, self.peers)
                log.warning(
                    "rank %d: %d ranks of this node cannot share memory (%s); they use TCP",
                    self.session.info.rank, len(island), problems[0],
                )  # fmt: skip
        return found

    def _connect(self) -> None:
        """The first rank of each island joins the tree; all hear if one cannot."""
        leads = self.rank == self.island[0]
        children = children_of(self._index, len(self.islands)) if leads else []
        purpose = f"tree/{self.key}"
        address, proof = self.session.client.local_address, self.session.proof
        door = Door(address, proof, purpose, children) if children else None
        try:
            doors = [unpack(data) for data in self._meet("doors", pack(door and door.address))]
            problem = self._join_tree(doors, door, purpose) if leads else ""
        finally:
            if door:
                door.close()
        told = [data.decode() for data in self._meet("tree", problem.encode()) if data]
        if told:
            me = self.session.info.rank
            raise CoordinatorTimeout(problem or f"rank {me} could not join: {told[-1]}")

    def _join_tree(self, doors: list[Any], door: Door | None, purpose: str) -> str:
        """Why this rank cannot connect to its neighbours; nothing if it has."""
        me, parent = self.peers[self.rank], None
        deadline = time.monotonic() + JOIN_PART * self._joining.left_s
        try:
            if self._index > 0:
                above = self.islands[parent_of(self._index)][0]
                target, label = doors[above], f"{purpose}/{self._index}"
                parent = climb(target, self.session.proof, me, self.peers[above], label, deadline)
            children = door.wait(deadline, self._meetings.check_lost) if door else {}
        except Late:
            return self._children_missing(door)
        except CoordinatorError as error:
            return str(error)
        self._tree = Tree(self._index, len(self.islands), parent, children)
        return ""

    def _children_missing(self, door: Door | None) -> str:
        assert door is not None
        wanted = children_of(self._index, len(self.islands))
        late = [self.peers[self.islands[i][0]] for i in wanted if i not in door.came]
        names = " and ".join(f"{peer} at {peer.address}" for peer in late)
        me = self.peers[self.rank]
        return (
            f"rank {me.rank} (host {me.host}, address {me.address}) waited "
            f"{JOIN_PART * self._joining.timeout_s:g} s in {self._joining.call} for {names} to "
            "connect"
        )

    # ---- calling ----

    def exchange(
        self,
        waiting: Waiting,
        data: bytes,
        root: int = EVERYBODY,
        reader: int = EVERYBODY,
        is_scattered: bool = False,
    ) -> list[bytes]:
        """What each rank gives, or nothing where this rank is not to read it.

        root: who alone gives, or takes, for the ranks to check that they mean the same.
        reader: who reads. is_scattered: each rank reads its part of what scattered() made.
        """
        call = waiting.call
        self._last = (*call, waiting.since)
        self.detector.check_group(waiting)
        try:
            if len(self.islands) == 1:
                wants = reader in (EVERYBODY, self.rank)
                return self._exchange_here(waiting, root + 1, data, wants, is_scattered)
            return self._exchange_everywhere(waiting, data, root, reader, is_scattered)
        except _node_shm.Mismatch:
            raise self.detector.in_different_calls(waiting) from None
        except EdgeBroken as error:
            neighbour = self.islands[error.index][0]
            raise self.detector.broken(neighbour, str(error), waiting) from error
        finally:
            self._last = (*call, time.monotonic())

    def _exchange_here(
        self, waiting: Waiting, tag: int, data: bytes, wants: bool, is_scattered: bool
    ) -> list[bytes]:
        """Among the ranks of this island, by their place in it."""
        board = self._board  # ours, even if another thread closes the group
        if board is None:
            return [data]
        call = waiting.call
        found = board.exchange(
            call.name, call.number, tag, call.where, data, wants, is_scattered, SLICE_S
        )
        while found is None:
            self.detector.check(waiting)
            found = board.resume(SLICE_S)
        return found

    def _exchange_everywhere(
        self, waiting: Waiting, data: bytes, root: int, reader: int, is_scattered: bool
    ) -> list[bytes]:
        """First within the islands, then between their first ranks, then within again."""
        leads = self.rank == self.island[0]
        given = self._exchange_here(waiting, root + 1, data, leads, False)
        entries = self._climb(waiting, given, root, reader, is_scattered) if leads else []
        brought = pack(entries) if leads and len(self.island) > 1 else b""
        told = self._exchange_here(waiting, root + 1, brought, not leads, False)
        if not leads:
            entries = unpack(told[0])
        found = [b""] * self.size
        for src, dst, part in entries:
            if dst in (EVERYBODY, self.rank):
                found[src] = part
        return found

    def _climb(
        self, waiting: Waiting, given: list[bytes], root: int, reader: int, is_scattered: bool
    ) -> list[tuple[int, int, bytes]]:
        """Who gives whom what, of that which ranks of this island want."""
        assert self._tree is not None
        entries: list[Entry] = []
        for src, data in zip(self.island, given, strict=True):
            if is_scattered and data:
                each = enumerate(parts(data, self.size))
                entries += [Entry(self._index, src, dst, part) for dst, part in each]
            elif data:
                entries.append(Entry(self._index, src, reader, data))

        def goes_to(entry: Entry) -> int:
            return EVERYWHERE if entry.dst == EVERYBODY else self._island_of[entry.dst]

        mine = (*waiting.call[:2], root)
        idle: Callable[[], None] = lambda: self.detector.check(waiting)  # noqa: E731
        headers, found = self._tree.exchange(
            (mine, waiting.call), entries, goes_to, waiting.deadline + EDGE_S, idle
        )
        for index, (theirs, call) in headers:
            if tuple(theirs) != mine:
                first = self.peers[self.islands[index][0]]
                me = self.peers[self.rank].rank
                calls = {me: waiting.call, first.rank: Call(*call)}
                raise self.detector.disagree(calls, waiting)
        return [(entry.src, entry.dst, entry.data) for entry in found]

    def _neighbour(self) -> Peer:
        """The next rank on this node."""
        return self.peers[self.island[(self.island.index(self.rank) + 1) % len(self.island)]]

    def set_status(self, status: int) -> None:
        if self._board is not None:
            self._board.set_status(status)

    def close(self) -> None:
        self.session.forget(self)
        if self._tree is not None:
            self._tree.close()
        if self.peers:
            self.detector.close()
        self._board = self._tree = None

    def drop(self) -> None:
        """In a forked child: close the descriptors, which leaves those of the parent alone."""
        if self._tree is not None:
            self._tree.close()
        if self.peers:
            self.detector.drop()


def _islands(peers: Sequence[Peer]) -> list[list[int]]:
    """Places of the group that may share memory: of one node, one kernel, one user."""
    by_rank = {peer.rank: place for place, peer in enumerate(peers)}
    found: dict[tuple[int, str], list[int]] = {}
    for number, node in enumerate(group_by_node(peers)):
        for rank in node:
            place = by_rank[rank]
            found.setdefault((number, peers[place].memory), []).append(place)
    return sorted(sorted(island) for island in found.values())


def scattered(given: Sequence[bytes]) -> bytes:
    """The parts for each rank in one piece: a table of where each begins, and then the parts."""
    offsets = [0]
    for part in given:
        offsets.append(offsets[-1] + len(part))
    return struct.pack(f"={len(offsets)}Q", *offsets) + b"".join(given)


def parts(data: bytes, size: int) -> list[bytes]:
    """What scattered() was given."""
    table = struct.calcsize(f"={size + 1}Q")
    offsets = struct.unpack_from(f"={size + 1}Q", data)
    view = memoryview(data)[table:]
    return [bytes(view[offsets[i] : offsets[i + 1]]) for i in range(size)]
