"""The HTTP server of `drumline serve --restarts N`, in the process that starts the ranks.

serve_with_restarts(3, job, "checkpoint", port=8000)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import launcher
from coordinator import Peer
from drumline.contact.loading.hub import local_folder
from drumline.core.device_map import DeviceMap
from drumline.errors import DrumlineError
from drumline.serving import http_server
from drumline.serving.front.remote_scheduler import Message, RemoteScheduler
from drumline.serving.front.restarting_ranks import RestartingRanks
from drumline.serving.scheduler import ServingLimits


def serve_with_restarts(
    restarts: int,
    job: launcher.Job,
    model_path: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    key_file: str | None = None,
    memory: list[str] | None = None,
    max_length: int | None = None,
    max_running: int = 16,
    max_waiting: int = 64,
    *,
    dtype: str | None = None,
    device_map: str = "auto",
    tp: int | None = None,
    served_model_name: Sequence[str] | None = None,
    chat_template: str | None = None,
    log_requests: bool = False,
    allowed_origins: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Answer requests here by the ranks of all nodes, which are started again if one fails.

    Each open request then goes on behind the tokens that it has. Returns when stopped. restarts: at
    most so many. job: of ranks that run serve_front(), without its arguments, on this node, the
    first. memory: of the ranks of all nodes, or one size. The others as in http_server.serve().

    Raises LaunchError if the ranks cannot load the model, and PeerLost when one is lost after the
    last restart, once every open request was answered with that error.
    """
    folder = str(local_folder(model_path, options.get("revision"), options.get("gguf_file")))
    endpoint = http_server.Endpoint.open(
        folder, host, port, key_file, max_length, chat_template, options
    )
    from drumline.serving.app import Service

    limits = ServingLimits(endpoint.max_length, max_running, max_waiting)
    names = http_server.served_names(model_path, served_model_name)
    service = Service(names, None, endpoint.tokenizer, limits, sampling=endpoint.sampling)
    scheduler = service.scheduler
    assert isinstance(scheduler, RemoteScheduler)

    def on_ready(info: Message) -> None:
        service.status.device_map = DeviceMap.from_json(info["device_map"])
        service.status.peers = [Peer.unpack(peer.encode()) for peer in info["peers"]]

    map_options = {"dtype": dtype, "device_map": device_map, "tp": tp}
    sizes = (memory, endpoint.max_length, max_running)
    job = replace(job, args=(job.node_rank, folder, *sizes, map_options, options))
    with endpoint.listener, _restarting(scheduler, job, restarts, on_ready) as ranks:
        ranks.wait_until_ready()
        http_server.serve_requests(service, endpoint, log_requests, allowed_origins)


def _restarting(*arguments: Any) -> contextlib.closing[RestartingRanks]:
    try:
        return contextlib.closing(RestartingRanks(*arguments))
    except OSError as error:  # other nodes could not connect
        raise DrumlineError(f"rank 0: {error.strerror}") from error
