"""An HTTP server that speaks OpenAI's API, over one model on every rank.

python -m drumline serve --model DIR -n 2
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import Coordinator
from drumline.checkpoint.config_files import read_tokenizer
from drumline.core.consistency import run_on_all_ranks
from drumline.errors import DrumlineError, PeerLost
from drumline.serving.scheduler import Limits
from drumline.strategies.load import Memory, load
from drumline.strategies.with_model import num_positions, read_generator

LONGEST = 4096  # tokens of a row, where the model allows more and the user says nothing
GRACE_S = 2  # for answers under way when the server is stopped; an engine's launcher kills after 5
REGRET_S = 2  # for those who wait after that to hear that no more comes
WATCH_S = 0.5


def serve(
    model_path: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    key_file: str | None = None,
    memory: Memory | None = None,
    max_length: int | None = None,
    max_running: int = 16,
    max_waiting: int = 64,
) -> None:
    """Load the model over all ranks, and answer requests on the master until stopped. Collective.

    host: by default for this machine alone; for another, key_file must hold a key for the clients.
    port: 0 takes a free one; the first line that is printed says which.
    max_length: tokens of a prompt with its answer. max_running, max_waiting: prompts at a time.

    Raises PeerLost when a rank is lost, after telling so to those who wait for an answer.
    """
    with Coordinator() as coor:

        def prepare() -> tuple[int, _Front | None]:
            if not coor.is_master():  # which alone has the files, perhaps
                return 0, None
            _import_uvicorn()
            key = _key(host, key_file)
            length = _length(model_path, max_length)
            return length, _Front(read_tokenizer(model_path), _bound(host, port), key)

        length, front = run_on_all_ranks(coor, prepare)
        length = coor.broadcast_object(length)
        with (
            front.listener if front else _signals(signal.SIG_IGN),  # the master tells when to end
            load(
                model_path, coor=coor, max_memory=memory, batch=max_running, length=length
            ) as model,
        ):
            assert front is not None  # the others serve within load
            threads = max(2, len(model.device_map.ranks))
            limits = Limits(length, max_running, max_waiting, threads)
            _answer(model, model_path, coor, limits, front)


@dataclass(frozen=True)
class _Front:
    """What the clients meet, apart from the model."""

    tokenizer: Any
    listener: socket.socket
    key: str | None


def _bound(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen before there is a model to answer."""
    listener = None
    try:
        where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(where[0][0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where[0][4])
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise DrumlineError(
            f"rank 0: cannot serve at {host}, port {port}: {error}; give another --host or --port."
        ) from error
    return listener


def _key(host: str, key_file: str | None) -> str | None:
    try:
        key = Path(key_file).read_text().strip() if key_file else None
    except (OSError, UnicodeError) as error:
        raise DrumlineError(
            f"rank 0: the key in {key_file} cannot be read ({error}), so nobody would be let in; "
            "write one of 32 letters there."
        ) from error
    if key == "":
        raise DrumlineError(f"rank 0: the key in {key_file} is empty; write one of 32 letters.")
    if key is None and not _is_loopback(host):
        raise DrumlineError(
            f"rank 0: whoever reaches {host} could use the model, for there is no key; put one "
            "into a file and give --api-key-file FILE, or serve on 127.0.0.1."
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _length(model_path: str, wanted: int | None) -> int:
    """Tokens of a row: what is wanted, if the model has positions for so many."""
    config = read_generator(model_path)
    if config.is_encoder_decoder:
        raise DrumlineError(
            f"rank 0: {model_path} answers a text rather than continuing it, which no request here "
            "asks for; serve a decoder, or call generate() in a script of your own."
        )
    most = num_positions(config)
    if wanted is not None and wanted > most:
        raise DrumlineError(
            f"rank 0: rows of {wanted} tokens were asked for, but the model has positions for "
            f"{most}; give --max-length {most} or less."
        )
    return wanted or min(most, LONGEST)


def _import_uvicorn() -> Any:
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise DrumlineError(
            f"rank 0: serving needs a web server, but {error}; `pip install fastapi uvicorn`."
        ) from error
    return uvicorn


def _answer(
    model: Any,
    path: str,
    coor: Coordinator,
    limits: Limits,
    front: _Front,
) -> None:
    from drumline.serving.app import Service, application

    uvicorn = _import_uvicorn()
    name = Path(path).resolve().name
    with contextlib.closing(Service(name, model, front.tokenizer, limits)) as service:
        options = {"log_level": "warning", "access_log": False, "lifespan": "off"}
        app = application(service, front.key)
        config = uvicorn.Config(app, timeout_graceful_shutdown=GRACE_S + REGRET_S, **options)
        server = uvicorn.Server(config)
        front.listener.listen()
        host, port = front.listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"serving {name} at http://{host}:{port}/v1", flush=True)
        with _stopping(server), _watching(coor, service, server):
            server.run(sockets=[front.listener])
    if service.failure is not None:
        raise service.failure


def _stopping(server: Any) -> contextlib.AbstractContextManager[None]:
    """Within, SIGINT and SIGTERM end the server in order, and nothing else."""
    server.capture_signals = contextlib.nullcontext  # which would raise them again at the end
    return _signals(server.handle_exit)


@contextlib.contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Within, what SIGINT and SIGTERM do; where threads are ranks, their process decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _watching(coor: Coordinator, service: Any, server: Any) -> Iterator[None]:
    """Within, a rank that is lost ends the server, even one that nobody asks anything; and a server
    that ends tells so to those whose answers are not done in time."""
    is_over = threading.Event()

    def watch() -> None:
        grace_s = float(GRACE_S)
        while not is_over.wait(WATCH_S):
            gone = [str(peer) for peer in coor.peers if peer.is_known_dead()]
            if gone:
                text = f"rank 0: {' and '.join(gone)} is gone, so nothing can be answered"
                service.fail(PeerLost(f"{text}; start all ranks again."))
            if service.failure is not None:
                server.should_exit = True
            grace_s -= WATCH_S * server.should_exit
            if grace_s < 0:
                service.close()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
