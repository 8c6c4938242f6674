"""RankActor: one rank of a launch under Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import replace
from typing import Any

from launcher import launch_secret, ports
from launcher.job import Job, Target
from launcher.launch_info import ENCRYPT, LaunchInfo
from launcher.records import json_values
from launcher.runtime import rank_environment, rank_process


class RankActor:
    """An actor, and so a process of its own; it takes and returns only strings and bytes."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._torch_port_holder: socket.socket | None = None

    def listen(self, launch_id: str, address: str, port: int) -> tuple[int, int]:
        """On rank 0 only: listen, and keep a port for torch.distributed; return both ports."""
        self._listener = ports.listen(launch_id, address, port)
        master_port = int(self._listener.getsockname()[1])
        self._torch_port_holder = ports.reserve_for_torch(launch_id, master_port)
        return master_port, int(self._torch_port_holder.getsockname()[1])

    def run(
        self,
        info: bytes,
        torch_port: int,
        restart_count: int,
        secret: bytes,
        encrypt: bool,
        folder: str,
        kind: str,
        name: str,
        arguments: str,
    ) -> str:
        """Run the target; returns a record, {"result": ...} or {"failure": ...}, as text.

        folder: the working directory of the launcher; that of Ray's processes is the cluster's.
        """
        with contextlib.suppress(OSError):  # not on this host: functions do without
            os.chdir(folder)
            sys.path.insert(0, folder)
        extras = {"secret_fd": str(launch_secret.store(secret))}
        if encrypt:
            extras[ENCRYPT] = "1"
        if self._listener:
            extras["master_fd"] = str(self._listener.fileno())
        rank_info = LaunchInfo.from_bytes(info)
        rank_info = replace(rank_info, extras={**rank_info.extras, **extras})
        rank_environment.set_variables(rank_info, torch_port, restart_count)
        job = Job(Target(kind, name), args=tuple(json_values.loads(arguments)))  # type: ignore[arg-type]
        records: list[dict[str, Any]] = []
        code = rank_process.run_target(job, rank_info, records.append)
        if not records:
            sys.exit(code)  # a child that the target has forked
        return json_values.dumps(records[0])
