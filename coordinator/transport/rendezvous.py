"""How ranks wait for each other while they become a group: at rank 0, since they know no better."""

from __future__ import annotations

import time
from collections.abc import Sequence

from coordinator.call_site import Waiting
from coordinator.control.client import HubGone
from coordinator.control.framing import Late
from coordinator.control.session import ANSWER_S, EXIT_S, Session
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.failure.detector import LAST_ANSWER_S, FailureDetector
from coordinator.failure.group_failure import GroupFailure

PATIENCE_S = 1.0  # after which we ask who is lost
SLICE_S = 0.05
ALIKE = "All members of a group must make the call that makes it, with the same ranks."


class Meetings:
    """The meetings of one group that is being made.

    members: ranks of the launch, by their place in the group. parent: looks after a group that has
    all of them.
    """

    def __init__(
        self,
        key: str,
        session: Session,
        members: Sequence[int],
        parent: FailureDetector | None,
        waiting: Waiting,
    ) -> None:
        self._key, self._session, self._members = key, session, members
        self._parent, self._waiting = parent, waiting
        self._rank = session.info.rank
        self._patience = time.monotonic() + PATIENCE_S
        self._came: list[int] | None = None  # places, asked for shortly before the deadline

    def meet(self, name: str, data: bytes) -> list[bytes]:
        """What every rank gives. Collective."""
        key = f"{self._key}/{name}"
        place, size = self._members.index(self._rank), len(self._members)
        self._came = None
        try:
            found = self._session.ask(
                "meet", key, place, size, data,
                timeout_s=self._waiting.left_s, idle=lambda: self._look(key),
            )  # fmt: skip
            return list(found)
        except HubGone as error:
            raise self._without_hub() from error
        except Late as error:
            raise self._too_late(key) from error

    def _look(self, key: str) -> None:
        """Raise if a member will not come; ask who has, before it is too late to ask."""
        self.check_lost()
        left_s = self._waiting.left_s
        if self._came is None and left_s < min(ANSWER_S, self._waiting.timeout_s / 4):
            self._came = self._ask_who_came(key, left_s)

    def check_lost(self) -> None:
        """Raise if a member is dead, or has left."""
        if self._parent is not None:
            self._parent.check_members(self._members, self._waiting)
        if time.monotonic() > self._patience:
            self._session.refresh(min(ANSWER_S, self._waiting.left_s))
            self._patience = time.monotonic() + PATIENCE_S
        self._check_given_up()
        lost = [rank for rank in self._members if rank in self._session.lost]
        if lost and self._parent is None:
            raise PeerLost(
                f"rank {self._rank} was in {self._waiting.call} when {self._named(lost)} exited, "
                "or lost the connection to rank 0, before all of launch "
                f"{self._session.info.launch_id} had joined. Look at what was printed there last."
            )

    def _check_given_up(self) -> None:
        data = self._session.verdicts.get(self._key)
        if data is not None:
            failure = GroupFailure.unpack(data)
            me, call, waited_s = self._rank, self._waiting.call, self._waiting.waited_s
            raise CoordinatorTimeout(
                f"rank {me} entered {call}, but rank {failure.reporter} had already given up, in "
                f"{failure.where}, waiting for {failure.text}. {ALIKE}"
                if me in failure.ranks
                else f"rank {me} waited {waited_s:.1f} s in {call} for {failure.text}. "
                f"Rank {failure.reporter} noticed it, in {failure.where}. {ALIKE}"
            )

    def _give_up(self, text: str, missing: Sequence[int]) -> None:
        """Tell who comes later that this rank does not wait any more."""
        call = str(self._waiting.call)
        failure = GroupFailure.of(CoordinatorTimeout, self._rank, call, text, missing)
        self._session.report(self._key, failure.pack())

    def _named(self, ranks: Sequence[int]) -> str:
        try:
            names = self._session.ask("names", ranks, timeout_s=LAST_ANSWER_S)
        except (HubGone, Late, CoordinatorError):
            return f"ranks {list(ranks)}"
        return " and ".join(
            f"rank {rank} ({name})" for rank, name in zip(ranks, names, strict=True)
        )

    def _ask_who_came(self, key: str, timeout_s: float) -> list[int] | None:
        try:
            return list(self._session.ask("came", key, timeout_s=timeout_s))
        except (HubGone, Late, CoordinatorError):
            return None

    def _without_hub(self) -> CoordinatorError:
        """A process that ends closes its connections first: who it was shows a little later."""
        until = time.monotonic() + EXIT_S
        while self._parent is not None and time.monotonic() < until:
            try:
                self._parent.check_members(self._members, self._waiting)
            except CoordinatorError as error:
                return error
            time.sleep(SLICE_S)
        return PeerLost(
            f"rank {self._rank} was in {self._waiting.call} when {self._session.master()} was "
            "found to be gone, while the ranks were joining. Look at what rank 0 printed last."
        )

    def _too_late(self, key: str) -> CoordinatorTimeout:
        info, waited = self._session.info, self._waited()
        came = self._came
        if came is None:
            came = self._ask_who_came(key, LAST_ANSWER_S)
        if came is None:
            return CoordinatorTimeout(
                f"{waited} to join launch {info.launch_id}, but {self._session.master()} does not "
                "answer: it is stopped, stuck or cut off."
            )
        missing = [rank for place, rank in enumerate(self._members) if place not in came]
        if self._parent is not None:
            described = self._parent.describe_ranks(missing)
            self._give_up(described, missing)
            return CoordinatorTimeout(f"{waited} for {described}. {ALIKE}")
        return CoordinatorTimeout(
            f"{waited} for ranks {missing} to join launch {info.launch_id}. Were all "
            f"{info.world_size} ranks started, and do the missing ones reach "
            f"{info.master_addr}:{info.master_port}?"
        )

    def _waited(self) -> str:
        return f"rank {self._rank} waited {self._waiting.timeout_s:g} s in {self._waiting.call}"
