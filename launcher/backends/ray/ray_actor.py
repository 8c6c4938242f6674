"""One rank of a launch under Ray: what its actor does."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

from launcher import launch_secret, ports
from launcher.external.rank_main import outcome
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.records import json_values


class Rank:
    """Ray keeps one process for it; everything that goes in and comes out is a string or bytes."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, launch_id: str, address: str, port: int) -> int:
        """Called on rank 0 only: the port on which it listens from now on."""
        self._listener = ports.listen(launch_id, address, port)
        return int(self._listener.getsockname()[1])

    def run(
        self, info: bytes, secret: bytes, folder: str, kind: str, name: str, arguments: str
    ) -> str:
        """Run the target; returns a record, {"result": ...} or {"failure": ...}, as text.

        folder: in which the launcher was started; Ray's processes begin where its cluster was.
        """
        with contextlib.suppress(OSError):  # not on this host: functions do without
            os.chdir(folder)
            sys.path.insert(0, folder)
        extras = {"secret_fd": str(launch_secret.store(secret)), **self._master_fd()}
        me = LaunchInfo.from_bytes(info)
        me = replace(me, extras={**me.extras, **extras})
        os.environ.update(me.to_env())
        job = Job(Target(kind, name), args=tuple(json_values.loads(arguments)))  # type: ignore[arg-type]
        return json_values.dumps(outcome(job, me))

    def _master_fd(self) -> Mapping[str, str]:
        return {"master_fd": str(self._listener.fileno())} if self._listener else {}
