"""The HTTP server of `drumline serve --restarts N`, in the process that starts the ranks.

serve_with_restarts(3, job, "checkpoint", port=8000)
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
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


def serve_with_restarts(restarts: int, job: launcher.Job, model_path: str, **options: Any) -> None:
    """Answer requests here by the ranks of all nodes, which are started again if one fails.

    Each open request then goes on behind the tokens that it has. Returns when stopped. restarts:
    the most of them. job: of ranks that run serve_front(), without its arguments, on this node, the
    first. options: as in http_server.serve(); memory is of the ranks of all nodes, or one size.

    Raises LaunchError if the ranks cannot load the model, and PeerLost when one is lost after the
    last restart, once every open request was answered with that error.
    """
    settings = http_server.ServerSettings.of(model_path, **options)
    source = settings.load_options
    folder = str(local_folder(model_path, source.get("revision"), source.get("gguf_file")))
    endpoint = http_server.Endpoint.open(folder, settings)
    from drumline.serving.app import Service

    limits = ServingLimits(endpoint.max_length, settings.max_running, settings.max_waiting)
    own = {"sampling": endpoint.sampling, "images": endpoint.images}
    service = Service(settings.names, None, endpoint.tokenizer, limits, **own)
    scheduler = service.scheduler
    assert isinstance(scheduler, RemoteScheduler)

    def on_ready(info: Message) -> None:
        service.status.device_map = DeviceMap.from_json(info["device_map"])
        service.status.peers = [Peer.unpack(peer.encode()) for peer in info["peers"]]

    of_ranks = replace(settings, model_path=folder, max_length=endpoint.max_length)
    job = replace(job, args=(job.node_rank, asdict(of_ranks)))
    with endpoint.listener:
        try:
            ranks = RestartingRanks(scheduler, job, restarts, on_ready)
        except OSError as error:  # other nodes could not connect
            raise DrumlineError(f"rank 0: {error.strerror}") from error
        with contextlib.closing(ranks):
            ranks.wait_until_ready()
            http_server.serve_requests(service, endpoint, settings)
