"""Compiles once and loads everywhere: one rank builds, the others get the bytes.

run = precompile(model, (tokens,), coor)           # AOTInductor; every rank puts in its own weights
path = get_or_build(fingerprint(shape=[8, 128]), build, coor)       # or any artifact of yours

Loading an artifact runs what is in it. So the cache is a folder that only its owner can enter, and
every file in it is authenticated.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from coordinator import Coordinator
from drumline.checkpoint.shard_loader import node_ranks
from drumline.compile_once.artifact_cache import ArtifactCache, BuildError

VERSION = 1
"""Of what artifacts look like; part of every key."""


BUILD_S = 24 * 3600.0
"""How long ranks wait for a builder: compilers take their time, and a death is noticed."""

PATHS = ("name_or_path", "_name_or_path")
"""Where a model of transformers says what folder it came from; that is no part of what it is."""

WEIGHTLESS = {
    "aot_inductor.package_constants_in_so": False,
    "cpp_cache_precompile_headers": False,  # pays off from the second compilation on
}


def fingerprint(*sources: Any, **facts: Any) -> str:
    """A key for what is made of these sources and facts by this machine's kind of hardware.

    sources: functions, classes or modules whose text matters.
    facts: anything JSON can hold: shapes, dtypes (as text), sizes of the mesh, options of the
        compiler. Leave out what differs between ranks that could share: rank, host, path, and the
        number of a device. torch, Python's ABI and the architecture are added here.
    """
    known = {
        "version": VERSION,
        "torch": [torch.__version__, torch.version.git_version],
        "python": sys.implementation.cache_tag,
        "hardware": _hardware(),
        "sources": [hashlib.sha256(inspect.getsource(one).encode()).hexdigest() for one in sources],
        "facts": facts,
    }
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _hardware() -> list[Any]:
    capability = torch.backends.cpu.get_cpu_capability()
    found: list[Any] = [os.uname().machine, capability, _instructions()]
    if torch.cuda.is_available():
        found += [torch.cuda.get_device_name(), torch.cuda.get_device_capability()]
        found += [torch.version.cuda, torch.version.hip]
    return found


def _instructions() -> list[str]:
    """What this CPU can do: Inductor compiles for all of it (-march=native), and it is not asked
    for again where the artifact is loaded."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(value.split())
    return []


def get_or_build(
    key: str,
    build: Callable[[], bytes],
    coor: Coordinator,
    *,
    folder: str | Path | None = None,
) -> Path:
    """The file of the artifact `key` on this rank's node, built if nobody has it. Collective.

    Ranks may have different keys, as on mixed hardware: each key has one builder, its lowest rank,
    and never reaches a rank with another. The first rank of each node keeps the file in `folder`
    (of this user in this node's home, if not given), under a lock; a damaged one is built again.

    Raises BuildError on every rank if a builder fails, with its traceback.
    """
    keys = [data.decode() for data in coor.allgather(key.encode())]
    leaders = _leaders(keys, node_ranks(coor))
    mine = leaders[coor.rank]
    cache, data = _on_all(coor, lambda: _look(folder, key, coor.rank == mine))
    has = [bool(one) for one in coor.allgather(b"1" if data is not None else b"")]
    sources = _sources(keys, leaders, has)
    if sources[key] == coor.rank and data is None:
        data = _on_all(coor, lambda: _build(cache, key, build), BUILD_S)
    else:
        _on_all(coor, lambda: None, BUILD_S)
    _spread(coor, cache, key, keys, leaders, sources, data)
    return Path(coor.allgather(str(cache.path(key)).encode())[mine].decode())


def _on_all(coor: Coordinator, work: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """What work() returns here; if it fails on any rank, all raise what the first one raised."""
    result, error = None, ""
    try:
        result = work()
    except Exception:
        error = traceback.format_exc()
    for rank, data in enumerate(coor.allgather(error.encode(), timeout_s=timeout_s)):
        if data:
            raise BuildError(
                f"rank {coor.rank}: {coor.peers[rank]} failed, so no rank has the artifact; "
                f"correct this and start again:\n{data.decode()}"
            )
    return result


def _look(folder: str | Path | None, key: str, leads: bool) -> tuple[ArtifactCache, bytes | None]:
    cache = ArtifactCache(folder)
    return cache, cache.load(key) if leads else None


def _leaders(keys: Sequence[str], nodes: Sequence[Sequence[int]]) -> list[int]:
    """By rank, the first rank of its node that has its key."""
    found = [0] * len(keys)
    for node in nodes:
        for rank in node:
            found[rank] = next(other for other in node if keys[other] == keys[rank])
    return found


def _sources(keys: Sequence[str], leaders: Sequence[int], has: Sequence[bool]) -> dict[str, int]:
    """By key, who gives it to the others: the lowest rank that has it, or else that builds it."""
    found = {}
    for key in sorted(set(keys)):
        group = sorted({leaders[rank] for rank in range(len(keys)) if keys[rank] == key})
        found[key] = next((rank for rank in group if has[rank]), group[0])
    return found


def _build(cache: ArtifactCache, key: str, build: Callable[[], bytes]) -> bytes:
    """Build under the lock, unless another launch has done it meanwhile."""
    with cache.lock(key):
        data = cache.load(key)
        if data is None:
            data = build()
            cache.store(key, data)
        return data


def _spread(
    coor: Coordinator,
    cache: ArtifactCache,
    key: str,
    keys: Sequence[str],
    leaders: Sequence[int],
    sources: Mapping[str, int],
    data: bytes | None,
) -> None:
    """Give every leader that has none the bytes of its key, checked against their digest."""
    digests = coor.allgather(b"" if data is None else hashlib.sha256(data).digest())
    for one in sorted(sources):
        group = {leaders[rank] for rank in range(len(keys)) if keys[rank] == one}
        if all(digests[rank] for rank in group):
            continue
        src = sources[one]
        sent = coor.broadcast(data if coor.rank == src else None, src=src)
        needs = one == key and coor.rank in group and data is None
        _on_all(coor, lambda: _keep(cache, key, sent, digests[src]) if needs else None)  # noqa: B023


def _keep(cache: ArtifactCache, key: str, data: bytes, digest: bytes) -> None:
    if hashlib.sha256(data).digest() != digest:
        raise BuildError(f"the {len(data)} bytes of {key} arrived damaged")
    cache.store(key, data)


def precompile(
    model: nn.Module,
    inputs: tuple[Any, ...],
    coor: Coordinator,
    *,
    folder: str | Path | None = None,
    facts: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`model` compiled by AOTInductor for inputs like these: a function. Collective.

    One rank compiles; no other needs a compiler. The artifact holds no weights, so each rank's
    function computes with the weights of its own `model`, which may be another shard. Before it is
    returned, it is compared with the model itself on `inputs`.

    facts: what else the code depends on, such as the sizes of the mesh.
    options: of Inductor, beside those that make the artifact weightless.
    """
    return precompile_modules(
        [model],
        inputs,
        coor,
        folder=folder,
        facts=facts,
        dynamic_shapes=dynamic_shapes,
        options=options,
    )[0]


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
    """Modules that differ in weights only, such as a model's layers, compiled once. Collective.

    One function for each, with its own weights, from one artifact: a model of many layers compiles
    in the time of one. Each is compared with its module; see `precompile` for the rest. Raises
    BuildError on every rank for modules that are not alike.
    """
    first = modules[0]
    device = next(first.parameters()).device
    states = [_state(module) for module in modules]
    _on_all(coor, lambda: _refuse_unlike(modules, states))
    key = module_key(
        first, inputs, facts=facts or {}, dynamic=str(dynamic_shapes), options=options or {}
    )

    def build() -> bytes:
        return compile_weightless(first, inputs, dynamic_shapes, options)

    path = get_or_build(key, build, coor, folder=folder)
    runs = _on_all(coor, lambda: [load_compiled(path, state, device) for state in states])
    _on_all(coor, lambda: _compare(runs, modules, inputs))
    return list(runs)


def module_key(module: nn.Module, inputs: tuple[Any, ...], **facts: Any) -> str:
    """The key of what is compiled for a module: its text and that of all modules in it, their
    settings, and the shapes of its weights and of its inputs; the weights' values do not count."""
    leaves = [
        [list(x.shape), list(x.stride()), str(x.dtype), x.device.type]
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in tree_leaves(inputs)
    ]
    return fingerprint(
        *_texts(module),
        device=next(module.parameters()).device.type,
        state=_shapes(_state(module)),
        inputs=leaves,
        model=str(module),
        settings=_settings(module),
        config=_configuration(module),
        precision=[torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")],
        **facts,
    )


def _texts(module: nn.Module) -> list[Any]:
    """The files that the classes of a module come from, but torch's own, which has a version."""
    kinds = {type(inner) for inner in module.modules()}
    found = {}
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        if kind.__module__.partition(".")[0] != "torch":
            file = sys.modules.get(kind.__module__)
            found[kind.__module__] = file if getattr(file, "__file__", None) else kind
    return list(found.values())


def _settings(module: nn.Module) -> dict[str, str]:
    """Numbers, flags and words that the modules keep, on which their code may depend."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    return {
        f"{name}.{key}": repr(value)
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in PATHS
        and (
            type(value) in plain
            or (type(value) in (tuple, list) and all(type(one) in plain for one in value))
        )
    }


def _configuration(module: nn.Module) -> dict[str, str]:
    """What a model of transformers was built from, but for where it lay."""
    config: Any = getattr(module, "config", None)
    found = config.to_dict() if hasattr(config, "to_dict") else {"config": config}
    return {key: str(value) for key, value in found.items() if key not in PATHS}


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [list(t.shape), str(t.dtype)] for name, t in sorted(state.items())}


def _refuse_unlike(
    modules: Sequence[nn.Module], states: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    for number, (module, state) in enumerate(zip(modules, states, strict=True)):
        same = type(module) is type(modules[0]) and str(module) == str(modules[0])
        if not same or _shapes(state) != _shapes(states[0]):
            raise BuildError(
                f"module {number} is not like the first in class, text and shapes, so what is "
                "compiled for one would be wrong for the other; compile each kind for itself."
            )


def compile_weightless(
    model: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> bytes:
    """An AOTInductor package of the model's code, without its weights."""
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        configs = {**WEIGHTLESS, **(options or {})}
        aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
        return Path(path).read_bytes()


def load_compiled(
    path: str | Path, state: Mapping[str, torch.Tensor], device: torch.device
) -> Callable[..., Any]:
    """The function in a weightless package, on a device, with these weights. Compiles nothing."""
    from torch._inductor.package.package import AOTICompiledModel

    # Not aoti_load_package: it asks a compiler what this CPU can do.
    index = -1 if device.type == "cpu" else device.index or 0
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, index)
    package = AOTICompiledModel(loader)
    needed = package.get_constant_fqns()
    weights = {name: state[name].detach() for name in needed}
    package.load_constants(weights, check_full_update=True, user_managed=True)
    return package


def _compare(
    runs: Sequence[Callable[..., Any]], modules: Sequence[nn.Module], inputs: tuple[Any, ...]
) -> None:
    """The canary: what a compiled function says must be what its module says."""
    with torch.no_grad():
        for run, module in zip(runs, modules, strict=True):
            torch.testing.assert_close(run(*inputs), module(*inputs), rtol=1e-3, atol=1e-3)


def assert_identical_on_ranks(coor: Coordinator, value: torch.Tensor) -> None:
    """Raise BuildError on every rank unless all have the same bits. Collective.

    For a canary whose result the ranks share, before any answer is given to a user.
    """
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    told = coor.allgather(hashlib.sha256(data).digest())
    differ = [rank for rank, digest in enumerate(told) if digest != told[0]]
    if differ:
        raise BuildError(
            f"rank {coor.rank}: ranks {differ} compute another result than rank 0 on the same "
            "input, so an answer would depend on who gives it; compare their keys and weights."
        )
