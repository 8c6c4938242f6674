"""An HTTP server of OpenAI's API, over one model on every rank.

drumline serve --model DIR -n 2
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import resource
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator import Coordinator
from drumline import timings
from drumline.checkpoint.config_files import read_generation_config
from drumline.contact.loading.configs import response_template
from drumline.contact.loading.hub import is_hub_id
from drumline.errors import CheckpointError, DrumlineError, PeerLost
from drumline.serving.sampling import SAMPLING_FIELDS
from drumline.serving.scheduler import CHUNK_ON_ACCELERATOR, Scheduler, ServingLimits
from drumline.strategies.load import Memory, load
from drumline.strategies.opening import folder_on_all_ranks
from drumline.strategies.with_model import (
    num_positions,
    read_generator,
    read_model_processor,
    read_model_tokenizer,
)
from launcher import linux, stop_signals

log = logging.getLogger("drumline")

MAX_TEXT_NBYTES = 1 << 20  # of a key or a chat template; the largest templates have 60 KB
DEFAULT_MAX_LENGTH = 4096  # tokens, where the model has positions for more
MAX_WAITING_CONNECTIONS = 256  # idle, or sending, beside those whose requests run or wait
BACKLOG = 256  # connections that the kernel keeps, and that asyncio accepts at once


@dataclass(frozen=True)
class ServerSettings:
    """The arguments of serve(), by which a server is started.

    host: the address to listen on. Any but a loopback address requires key_file, a file with the
    key that clients send. port: 0 takes a free one; the first line that is printed names it.
    memory: of each rank. max_length: tokens of a prompt with its completion. max_running,
    max_waiting: prompts at a time. prompt_lookup: see ServingLimits. dtype, device_map, tp: as in
    load(). served_model_name: what requests call the model; the name of its folder if not given.
    chat_template: a file with a Jinja template, or the template itself. log_requests: a line of the
    log for each request.
    allowed_origins: of pages in browsers that may read answers. load_options: others of load().
    """

    model_path: str
    host: str = "127.0.0.1"
    port: int = 8000
    key_file: str | None = None
    memory: Memory | None = None
    max_length: int | None = None
    max_running: int = 16
    max_waiting: int = 64
    dtype: str | None = None
    device_map: str = "auto"
    tp: int | None = None
    served_model_name: Sequence[str] | None = None
    chat_template: str | None = None
    log_requests: bool = False
    allowed_origins: Sequence[str] | None = None
    prompt_lookup: int = 0
    load_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *arguments: Any, **options: Any) -> ServerSettings:
        """The settings of these fields; what is not one of them is an option of load()."""
        own = {name: options.pop(name) for name in cls.__dataclass_fields__ if name in options}
        return cls(*arguments, **{"load_options": options, **own})

    @property
    def names(self) -> list[str]:
        """The names that requests may use: that of the folder if none is given."""
        path = self.model_path
        own = path if is_hub_id(path) else Path(path).resolve().name
        return list(self.served_model_name or ()) or [own]

    def load(
        self, folder: str | Path, coor: Coordinator, memory: Memory | None, length: int
    ) -> Any:
        """Load the model of a folder over all ranks, as a context. Collective."""
        return load(
            folder,
            self.device_map,
            coor,
            max_memory=memory,
            dtype=self.dtype,
            batch=self.max_running,
            length=length,
            pass_tokens=self.max_running + CHUNK_ON_ACCELERATOR[0],
            tp=self.tp,
            disable_mmap=True,  # for as long as it runs, tokens count, and files may change
            **self.load_options,
        )


def serve(model_path: str, *arguments: Any, **options: Any) -> None:
    """Load the model over all ranks, and answer requests on rank 0 until stopped. Collective.

    arguments, options: the other fields of ServerSettings, and options of load(). Raises PeerLost
    when a rank is lost, after every open request was answered with that error.
    """
    settings = ServerSettings.of(model_path, *arguments, **options)
    with Coordinator() as coor:
        prepare = functools.partial(Endpoint.open, settings=settings)  # on rank 0 alone
        folder, endpoint = folder_on_all_ranks(coor, model_path, settings.load_options, prepare)
        length = coor.broadcast_object(endpoint and endpoint.max_length)
        with (
            # Rank 0 decides when the others end, so that they do not obey the signal themselves.
            endpoint.listener if endpoint else stop_signals.handled_by(lambda _: None),
            settings.load(folder, coor, settings.memory, length) as model,
        ):
            assert endpoint is not None  # the other ranks never leave load()
            service = endpoint.service(model)
            advice = ", so nothing can be answered; start all ranks again."
            with ended_by_failures(service.scheduler, coor, advice):
                endpoint.serve(service)


def ended_by_failures(scheduler: Scheduler, coor: Coordinator, advice: str = "") -> Any:
    """Tell a scheduler of its ranks; a context in which one that fails is the end of all in it.

    advice: behind the text of the failure.
    """
    scheduler.peers = [{"rank": p.rank, "host": p.host, "pid": p.pid} for p in coor.peers]
    return coor.on_failure(
        lambda failure: scheduler.fail(PeerLost(f"rank 0: {failure.text}{advice}", (failure,))),
        # A host that does not answer may recover: an error of the calls that wait for it.
        is_waiting=lambda: False,
    )


@dataclass(frozen=True)
class Endpoint:
    """The address for clients, and what is known of the model before it is loaded.

    settings: of the server. key: of the clients. max_length: tokens of a prompt with its
    completion. sampling: what the checkpoint's generation_config.json has of SAMPLING_FIELDS.
    images: their ImageReader, or None if the model takes none.
    """

    settings: ServerSettings
    tokenizer: Any
    listener: socket.socket
    key: str | None
    max_length: int
    sampling: Mapping[str, float]
    images: Any

    @classmethod
    def open(cls, folder: str | Path, settings: ServerSettings) -> Endpoint:
        """Raises DrumlineError for what cannot be served. folder: of the model's files."""
        _check_packages()
        options = settings.load_options
        key = _read_key(settings.host, settings.key_file)
        config = read_generator(folder, **options)
        if config.is_encoder_decoder:
            raise DrumlineError(
                f"rank 0: {folder} is an encoder-decoder, but OpenAI's API continues prompts; "
                "serve a decoder, or call generate() in a script of your own."
            )
        most = num_positions(config)
        if (length := settings.max_length or min(most, DEFAULT_MAX_LENGTH)) > most:
            raise DrumlineError(
                f"rank 0: --max-length is {length}, but {folder} has positions for {most}; give "
                f"--max-length {most} or less."
            )
        tokenizer = read_model_tokenizer(folder, **options)
        images = _image_reader(folder, tokenizer, options)
        _set_chat_template(folder, tokenizer, settings.chat_template)
        _set_response_template(folder, tokenizer, config)
        sampling = read_sampling_defaults(folder)
        listener = _bound(settings.host, settings.port)
        return cls(settings, tokenizer, listener, key, length, sampling, images)

    def service(self, model: Any) -> Any:
        """The Service that answers the requests of clients. model: None if other ranks have it."""
        from drumline.serving.app import Service

        limits = limits_for(model, self.max_length, self.settings)
        own = self.sampling, self.images
        return Service(self.settings.names, model, self.tokenizer, limits, *own)

    def serve(self, service: Any) -> None:
        """Listen and answer until SIGINT, SIGTERM or a lost rank, which is raised."""
        from drumline.contact import uvicorn_api
        from drumline.serving.app import application

        if self.settings.log_requests:
            logging.getLogger("drumline.requests").setLevel(logging.INFO)
        with contextlib.closing(service):
            app = application(service, self.key, self.settings.allowed_origins)
            server = uvicorn_api.server(uvicorn_config(app, service.limits))
            self.listener.listen(BACKLOG)
            host, port = self.listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            with (
                stop_signals.handled_by(lambda number: server.handle_exit(number, None)),
                _monitored(service, server),
            ):
                print(f"serving {service.name} at http://{host}:{port}/v1", flush=True)
                server.run(sockets=[self.listener])
        if service.scheduler.failure is not None:
            raise service.scheduler.failure


def limits_for(model: Any, max_length: int, settings: ServerSettings) -> ServingLimits:
    """The limits, with as many batches at a time as keep every rank busy, each for a sequence."""
    most, num_ranks = settings.max_running, 1 if model is None else len(model.device_map.ranks)
    sizes = most, settings.max_waiting, min(num_ranks, most), settings.prompt_lookup
    return ServingLimits(max_length, *sizes)


def _image_reader(folder: str | Path, tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """The reader of images for the model, if it takes any; the tokenizer gets its chat template."""
    from drumline.serving.image_reader import ImageReader

    try:
        processor = read_model_processor(folder, **options)
    except CheckpointError as error:
        log.warning("rank 0: requests with images will be refused: %s", error)
        return None
    if processor is None:
        return None
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    return ImageReader(processor)


def _text_of(file: str) -> str:
    """The text of a file of the user's. Raises OSError or UnicodeError."""
    with linux.open_now(file) as opened:
        text = opened.read(MAX_TEXT_NBYTES + 1)
    if len(text) > MAX_TEXT_NBYTES:
        raise OSError("File too large")
    return text.decode()


def _set_chat_template(folder: str | Path, tokenizer: Any, option: str | None) -> None:
    """Give a tokenizer the chat template of a file, or the one that the option is, if there is one.

    Raises DrumlineError unless its templates are Jinja: requests would be blamed for it.
    """
    from drumline.serving.prompt_reader import template_problem

    try:
        if option is not None:
            tokenizer.chat_template = option if "{" in option else _text_of(option)
    except (OSError, UnicodeError) as error:
        raise DrumlineError(
            f"rank 0: --chat-template {option} cannot be read ({error}); give a file with a "
            "Jinja template, or the template itself."
        ) from error
    template = tokenizer.chat_template
    for text in [*template.values()] if isinstance(template, dict) else [template]:
        if problem := "" if text is None else template_problem(tokenizer, text):
            place = f"the tokenizer of {folder} has" if option is None else "--chat-template is"
            raise (CheckpointError if option is None else DrumlineError)(
                f"rank 0: {place} {text!r:.60}, which is not a chat template ({problem:.200}); "
                "give a file with a Jinja template: --chat-template FILE."
            )


def _bound(host: str, port: int) -> socket.socket:
    """A socket at this address that does not listen yet: it does once the model is loaded."""
    with contextlib.ExitStack() as stack:
        try:
            kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
            family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
            listener = stack.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, OverflowError, UnicodeError) as error:
            raise DrumlineError(
                f"rank 0: cannot serve at {host}, port {port}: {error}; give another --host or "
                "--port."
            ) from error
        stack.pop_all()
        return listener


def _read_key(host: str, key_file: str | None) -> str | None:
    try:
        key = _text_of(key_file).strip() if key_file else None
        if key == "":
            raise OSError("it is empty")
        if key is not None and not (key.isprintable() and max(key) <= "\xff"):
            raise OSError("it has characters that no header has")
    except (OSError, UnicodeError) as error:
        raise DrumlineError(
            f"rank 0: the key in {key_file} cannot be read ({error}), so no client could connect; "
            "write a random key there, such as 32 characters."
        ) from error
    if key is None and not _is_loopback(host):
        raise DrumlineError(
            f"rank 0: there is no key, so everyone who reaches {host} could use the model; write "
            "a key into a file and give --api-key-file FILE, or serve on 127.0.0.1."
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _set_response_template(folder: str | Path, tokenizer: Any, config: Any) -> None:
    """Give a tokenizer the template that tells calls and reasoning apart in answers, or None."""
    tokenizer.response_template = response_template(tokenizer, config.model_type)
    try:
        if tokenizer.response_template is not None:
            tokenizer.get_response_parser(prefix="")
    except Exception as error:  # each of its fields is checked in a way of its own
        raise CheckpointError(
            f"{folder} has a response_template in its tokenizer_config.json that cannot be "
            f"used ({error}), so calls of tools could not be told from text; copy it again, or "
            "remove it."
        ) from error


def read_sampling_defaults(folder: str | Path) -> dict[str, float]:
    """The recommendations of a checkpoint for SAMPLING_FIELDS, which `vllm serve` takes too."""
    if not Path(folder, "generation_config.json").exists():
        return {}
    settings = read_generation_config(folder)
    fields = ((name, getattr(settings, name, None)) for name in SAMPLING_FIELDS)
    return {name: value for name, value in fields if value is not None}


def _check_packages() -> None:
    try:
        import drumline.contact.uvicorn_api
        import drumline.serving.app  # noqa: F401
    except ImportError as error:
        raise DrumlineError(
            f"rank 0: `drumline serve` needs packages that are not installed ({error}); "
            "`pip install 'drumline[serve]'`."
        ) from error


def uvicorn_config(app: Any, limits: ServingLimits) -> Any:
    """The settings of uvicorn: with few connections, so that descriptors are left for the model."""
    from drumline.contact import uvicorn_api
    from drumline.serving.connection import LimitedConnection

    num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_busy = limits.max_running + limits.max_waiting
    max_connections = min(num_busy + MAX_WAITING_CONNECTIONS, num_descriptors // 2)
    return uvicorn_api.config(
        app,
        functools.partial(LimitedConnection, max_connections=max_connections),
        backlog=BACKLOG,
        log_level="error",  # what strangers send is not worth a line
        access_log=False,
        timeout_graceful_shutdown=timings.TIMINGS.drain_s + timings.TIMINGS.notify_s,
    )


@contextlib.contextmanager
def _monitored(service: Any, server: Any) -> Iterator[None]:
    """Within, a lost rank ends the server, even an idle one; and once the server ends, requests
    that run for longer than drain_s get an error as their answer."""
    has_ended = threading.Event()
    poll_s = timings.TIMINGS.failure_poll_s

    def monitor() -> None:
        drain_s = timings.TIMINGS.drain_s
        while not has_ended.wait(poll_s):
            service.status.sample()
            if service.scheduler.failure is not None:
                server.should_exit = True
            service.is_stopping = server.should_exit
            drain_s -= poll_s * server.should_exit
            if drain_s < 0:
                service.scheduler.close()  # alone: bodies that are still read are refused by it
                return

    monitor_thread = threading.Thread(target=monitor)
    monitor_thread.start()
    try:
        yield
    finally:
        has_ended.set()
        monitor_thread.join()
