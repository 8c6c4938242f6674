"""Compilation on one rank for all: one builds, the others get the bytes.

run = precompile(model, (tokens,), coor)           # AOTInductor; every rank puts in its own weights
path = get_or_build(fingerprint(shape=[8, 128]), build, coor)       # or any artifact of yours

Loading an artifact runs the code in it. So the cache is a folder that only its owner can enter, and
every file in it is authenticated.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from coordinator import Coordinator, torch_private
from drumline import timings
from drumline.compile_once.artifact_cache import ArtifactCache, BuildError
from launcher import linux

T = TypeVar("T")

VERSION = 1
"""Format of the artifacts; part of every key."""

PATH_FIELDS = ("name_or_path", "_name_or_path")
"""Fields of a transformers model with the folder it came from, which is left out of the key."""

DEVICE_FIELD = "hf_device_map"
"""Of a transformers model, the numbers of its devices, which are left out, too."""

WEIGHTLESS_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "cpp_cache_precompile_headers": False,  # pays off from the second compilation on
}


def fingerprint(*sources: Any, **facts: Any) -> str:
    """A key for an artifact made of these sources and facts by this machine's kind of hardware.

    sources: functions, classes or modules whose text matters.
    facts: anything JSON can hold: shapes, dtypes (as text), sizes of the mesh, options of the
        compiler. Leave out what differs between ranks that could share: rank, host, path, and the
        number of a device. torch, Python's ABI and the architecture are added here.
    """
    content = {
        "version": VERSION,
        "torch": [torch.__version__, torch.version.git_version],
        "python": sys.implementation.cache_tag,
        "hardware": _hardware(),
        "sources": [hashlib.sha256(inspect.getsource(s).encode()).hexdigest() for s in sources],
        "facts": facts,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _hardware() -> list[Any]:
    capability = torch.backends.cpu.get_cpu_capability()
    hardware: list[Any] = [os.uname().machine, capability, _cpu_flags()]
    if torch.cuda.is_available():
        hardware += [torch.cuda.get_device_name(), torch.cuda.get_device_capability()]
        hardware += [torch.version.cuda, torch.version.hip]
    return hardware


def _cpu_flags() -> list[str]:
    """The instruction sets of this CPU.

    Inductor compiles for all of them (-march=native), and does not check them where it loads.
    """
    for line in linux.read_proc("cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(value.split())
    return []


def get_or_build(
    key: str, build: Callable[[], bytes], coor: Coordinator, *, folder: str | Path | None = None
) -> Path:
    """The file of the artifact `key` on this rank's node, built if no rank has it. Collective.

    Ranks may have different keys, as on mixed hardware: each key has one builder, its lowest rank,
    and never reaches a rank with another. The first rank of each node keeps the file in `folder`
    (of this user in this node's home, if not given), under a lock; a damaged one is built again.

    Raises BuildError on every rank if a builder fails, with its traceback.
    """
    keys = coor.allgather_object(key)
    leaders = _leaders_by_key(keys, coor.nodes)
    node = next(node for node in coor.nodes if coor.rank in node)
    leader = next(rank for rank in node if rank in leaders[key])
    cache = _on_all_ranks(coor, lambda: ArtifactCache(folder))
    data = _on_all_ranks(coor, lambda: cache.load(key) if coor.rank == leader else None)
    has = coor.allgather_object(data is not None)
    # By key, the rank that sends it: the lowest leader that has it, or the one that builds it.
    sources = {k: next((r for r in ranks if has[r]), ranks[0]) for k, ranks in leaders.items()}
    builds = sources[key] == coor.rank and data is None
    work = functools.partial(_build, cache, key, build) if builds else lambda: None
    built = _on_all_ranks(coor, work, timings.TIMINGS.load_s)
    _distribute(coor, cache, key, leaders, sources, built if builds else data)
    paths = coor.allgather_object(str(cache.path(key)))
    return Path(paths[leader])


def _leaders_by_key(keys: Sequence[str], nodes: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """By key, the first rank of each node that has it, the lowest first."""
    leaders: dict[str, list[int]] = {key: [] for key in sorted(set(keys))}
    for node in nodes:
        for key in {keys[rank] for rank in node}:
            leaders[key].append(next(rank for rank in node if keys[rank] == key))
    return {key: sorted(ranks) for key, ranks in leaders.items()}


def _on_all_ranks(coor: Coordinator, work: Callable[[], T], timeout_s: float | None = None) -> T:
    """Run local work on every rank; raise BuildError on all if it fails on any. Collective."""

    results: list[T] = []

    def checked() -> None:
        try:
            results.append(work())
        except Exception as error:
            raise BuildError(
                f"{coor.peers[coor.rank]} failed, so no rank has the artifact; correct this and "
                f"start again:\n{traceback.format_exc()}"
            ) from error

    coor.run_on_all_ranks(checked, error_class=BuildError, timeout_s=timeout_s)
    return results[0]


def _build(cache: ArtifactCache, key: str, build: Callable[[], bytes]) -> bytes:
    """Build under the lock, unless another launch has done it meanwhile."""
    with cache.lock(key):
        data = cache.load(key)
        if data is None:
            data = build()
            cache.store(key, data)
        return data


def _distribute(
    coor: Coordinator,
    cache: ArtifactCache,
    own_key: str,
    leaders: Mapping[str, Sequence[int]],
    sources: Mapping[str, int],
    data: bytes | None,
) -> None:
    """Send every leader that lacks it the artifact of its key, checked against its digest."""
    digests = coor.allgather(b"" if data is None else hashlib.sha256(data).digest())
    for key, src in sources.items():
        if all(digests[rank] for rank in leaders[key]):
            continue
        received = coor.broadcast(data if coor.rank == src else None, src=src)
        needs = key == own_key and coor.rank in leaders[key] and data is None
        store = functools.partial(_store_checked, cache, key, received, digests[src])
        _on_all_ranks(coor, store if needs else lambda: None, timings.TIMINGS.load_s)


def _store_checked(cache: ArtifactCache, key: str, data: bytes, digest: bytes) -> None:
    if hashlib.sha256(data).digest() != digest:
        raise BuildError(f"the {len(data)} bytes of {key} arrived damaged")
    with cache.lock(key):
        if cache.load(key) is None:
            cache.store(key, data)


def precompile(
    model: nn.Module, inputs: tuple[Any, ...], coor: Coordinator, **options: Any
) -> Callable[..., Any]:
    """`model` compiled by AOTInductor for inputs like these: a function. Collective.

    One rank compiles; no other needs a compiler. The artifact holds no weights, so each rank's
    function computes with the weights of its own `model`, which may be another shard. Before it is
    returned, it is compared with the model itself on `inputs`. options: of `precompile_modules`.
    """
    return precompile_modules([model], inputs, coor, **options)[0]


def precompile_modules(
    modules: Sequence[nn.Module],
    inputs: tuple[Any, ...],
    coor: Coordinator,
    *,
    folder: str | Path | None = None,
    facts: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> list[Callable[..., Any]]:
    """Compile modules that differ in weights only, such as a model's layers, once. Collective.

    One function for each, with its own weights, from one artifact: a model of many layers compiles
    in the time of one. Each is compared with its module; see `precompile`.

    folder: of the artifacts, see `get_or_build`.
    facts: what else the code depends on, such as the sizes of the mesh.
    dynamic_shapes: of torch.export.
    options: of Inductor, beside those that make the artifact weightless.

    Raises BuildError on every rank for modules that differ in more than weights.
    """
    first = modules[0]
    more = {"facts": facts or {}, "dynamic": str(dynamic_shapes), "options": options or {}}
    states, key = _on_all_ranks(
        coor, lambda: (_states_of_one_kind(modules), module_key(first, inputs, **more))
    )

    def build() -> bytes:
        return compile_weightless(first, inputs, dynamic_shapes, options)

    path = get_or_build(key, build, coor, folder=folder)
    device = _device_of(first, inputs)
    runs = _on_all_ranks(coor, lambda: [load_compiled(path, s, device) for s in states])

    def compare() -> None:
        try:
            _compare_outputs(runs, modules, inputs)
        except AssertionError as error:
            raise BuildError(
                f"{path} computes other values than its module does, perhaps as it was compiled "
                "for other settings, of which its key says nothing; delete it, and name in facts= "
                f"what the code of the module depends on. {error}"
            ) from error

    _on_all_ranks(coor, compare)
    return runs


def module_key(module: nn.Module, inputs: tuple[Any, ...], **facts: Any) -> str:
    """The key of a compiled module: its text and that of all modules in it, their settings, and the
    shapes of its weights and inputs. The values of the weights do not count."""
    leaves = [
        [list(x.shape), list(x.stride()), str(x.dtype), x.device.type]
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in torch_private.tree_leaves(inputs)
    ]
    device = _device_of(module, inputs).type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return fingerprint(
        *_texts(module),
        device=device,
        state=_shapes(all_tensors(module)),
        inputs=leaves,
        model=str(module),
        settings=_settings(module),
        config=_configuration(module),
        precision=[
            torch.get_float32_matmul_precision(),
            casts and str(torch.get_autocast_dtype(device)),
        ],
        **facts,
    )


def _device_of(module: nn.Module, inputs: tuple[Any, ...]) -> torch.device:
    """The device of its weights, or of its inputs if it has none."""
    tensors = [*all_tensors(module).values(), *torch_private.tree_leaves(inputs)]
    return next((x.device for x in tensors if isinstance(x, torch.Tensor)), torch.device("cpu"))


def _texts(module: nn.Module) -> list[Any]:
    """The files of the classes of a module; not those of torch, which has a version."""
    kinds = {type(inner) for inner in module.modules()}
    files = {}
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        if kind.__module__.partition(".")[0] != "torch":
            file = sys.modules.get(kind.__module__)
            files[kind.__module__] = file if getattr(file, "__file__", None) else kind
    return list(files.values())


def _settings(module: nn.Module) -> dict[str, str]:
    """Numbers, flags, text and functions in the modules, on which their code may depend."""
    return {
        f"{name}.{key}": text
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in (*PATH_FIELDS, DEVICE_FIELD) and (text := _setting(value))
    }


def _setting(value: Any) -> str:
    """The text of a setting, or of a tuple, list or dict of them; nothing for anything else."""
    if isinstance(value, functools.partial):
        value = (value.func, value.args, value.keywords)
    if type(value) in (tuple, list, dict):
        items = [_setting(item) for item in (value.items() if type(value) is dict else value)]
        return f"{type(value).__name__}({', '.join(items)})" if all(items) else ""
    if type(value) in (bool, int, float, str, type(None), torch.dtype):
        return repr(value)
    is_function = callable(value) and hasattr(value, "__qualname__")
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}" if is_function else ""


def _configuration(module: nn.Module) -> dict[str, str]:
    """The config that a transformers model was built from, without its folder."""
    config: Any = getattr(module, "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {"config": config}
    return {key: str(value) for key, value in fields.items() if key not in PATH_FIELDS}


def all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by each of their names."""
    names = (module.named_parameters, module.named_buffers)
    return {name: tensor for kind in names for name, tensor in kind(remove_duplicate=False)}


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [list(t.shape), str(t.dtype)] for name, t in sorted(state.items())}


def _states_of_one_kind(modules: Sequence[nn.Module]) -> list[dict[str, torch.Tensor]]:
    """The tensors of each; raise BuildError unless the modules differ in the values alone."""
    states = [all_tensors(module) for module in modules]
    for number, (module, state) in enumerate(zip(modules, states, strict=True)):
        same = type(module) is type(modules[0]) and str(module) == str(modules[0])
        if not same or _shapes(state) != _shapes(states[0]):
            raise BuildError(
                f"module {number} differs from the first in class, text or shapes, so the code of "
                "one would be wrong for the other; compile each kind separately."
            )
    return states


def compile_weightless(
    model: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> bytes:
    """An AOTInductor package of the model's code, without its weights."""
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        configs = {**WEIGHTLESS_OPTIONS, **(options or {})}
        torch_private.compile_package(program, path, configs)
        return Path(path).read_bytes()


def load_compiled(
    path: str | Path, state: Mapping[str, torch.Tensor], device: torch.device
) -> Callable[..., Any]:
    """The function in a weightless package, on a device, with these weights. Compiles nothing."""
    index = -1 if device.type == "cpu" else device.index or 0
    package = torch_private.open_package(str(path), index)
    needed = package.get_constant_fqns()
    weights = {name: state[name].detach() for name in needed}
    package.load_constants(weights, check_full_update=True, user_managed=True)
    return package  # type: ignore[no-any-return]  # torch has no type for it


def _compare_outputs(
    runs: Sequence[Callable[..., Any]], modules: Sequence[nn.Module], inputs: tuple[Any, ...]
) -> None:
    """Raise AssertionError unless every compiled function computes what its module does."""
    for run, module in zip(runs, modules, strict=True):
        with torch.no_grad():
            results = [torch_private.tree_leaves(call(*inputs)) for call in (run, module)]
        for result, expected in zip(*results, strict=True):
            rtol, atol = _tolerances(expected)
            torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


def _tolerances(x: Any) -> tuple[float, float]:
    """Some roundings of its dtype: of each number, and of the largest, whose terms may cancel.

    But never less than a thousandth."""
    if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()):
        return 1e-3, 1e-3
    step = 4 * torch.finfo(x.dtype).eps
    largest = float(x.double().nan_to_num(0, 0, 0).abs().max())
    return max(1e-3, step), max(1e-3, step * largest)


def assert_identical_on_ranks(coor: Coordinator, value: torch.Tensor) -> None:
    """Raise BuildError on every rank unless all have the same bits. Collective.

    For a test input that all ranks compute, before any answer is given to a user.
    """
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digests = coor.allgather(hashlib.sha256(data).digest())
    differ = [coor.ranks[n] for n, digest in enumerate(digests) if digest != digests[0]]
    if differ:
        raise BuildError(
            f"{coor.rank_name()}: ranks {differ} compute another result than "
            f"{coor.rank_name(0)} on the same input, so an answer would depend on the rank; "
            "compare their keys and weights."
        )
