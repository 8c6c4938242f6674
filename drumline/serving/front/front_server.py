"""The HTTP server of `drumline serve --restarts N`, in the process that starts the ranks.

serve_with_restarts(3, job, "checkpoint", port=8000)
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, replace
from typing import Any

import launcher
from drumline.contact.loading.hub import local_folder
from drumline.errors import DrumlineError
from drumline.serving import http_server
from drumline.serving.front.restarting_ranks import RestartingRanks


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
    service = endpoint.service(None)
    own = {"model_path": folder, "max_length": endpoint.max_length, "max_waiting": sys.maxsize}
    job = replace(job, args=(job.node_rank, asdict(settings) | own))  # the front has the queue
    with endpoint.listener:
        try:
            ranks = RestartingRanks(service.scheduler, job, restarts, settings.tp or 1)
        except OSError as error:  # other nodes could not connect
            raise DrumlineError(f"rank 0: {error.strerror}") from error
        with contextlib.closing(ranks):
            ranks.wait_until_ready()
            endpoint.serve(service)
