"""Operations that a model on several ranks does not support: each error says the alternative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from coordinator import torch_private
from drumline.checkpoint.json_files import MERGE_ADAPTER
from drumline.contact.caches import without_caches
from drumline.contact.loading.configs import attention_of
from drumline.contact.model_hooks import ModelHooks
from drumline.contact.model_parts import is_model, recorded_output
from drumline.core.mixed_classes import mixed_class
from drumline.errors import DrumlineError
from drumline.pipeline.pass_hooks import PassChecks, UnrecordedOutputs

NO_TRAINING = "it is for inference, under torch.no_grad(); train on a model that is whole"
NOT_COMPILED = "leave its forward as it is, for it waits for other ranks in every pass"

REFUSED_METHODS = {
    torch_private.move_method: (
        "moved or converted",
        "load it with the dtype= or device_map= that you want",
    ),
    "save_pretrained": ("saved", "copy the checkpoint that it was loaded from"),
    "load_state_dict": ("given other weights", "save them as a checkpoint and load that"),
    "add_adapter": ("given an adapter", MERGE_ADAPTER),
    "load_adapter": ("given an adapter", MERGE_ADAPTER),
    "compile": ("compiled", NOT_COMPILED),
    "gradient_checkpointing_enable": ("trained", NO_TRAINING),
    "__reduce_ex__": ("copied", "use it from several threads as it is, each with its own cache"),
}
"""By method of a model: what it cannot be from here, and what to do instead."""


SCALING_METHODS = ("div_", "mul_")
"""With one number, on a whole weight of another rank, done there: RWKV scales its weights so."""


class RemoteLayerError(DrumlineError):
    """Something was to be put into a layer on another rank."""


class UnsupportedMixin(ModelHooks):
    """Mixed into the class of a model. Where one rank has everything, everything works."""

    _pass_checks: PassChecks

    @property
    def _has_parts_elsewhere(self) -> bool:
        parts = [getattr(self, name, None) for name in ("_driver", "_prefetcher")]
        return any(part is not None for part in parts)

    def _refuse(self, verb: str, remedy: str) -> None:
        """Raise DrumlineError if parts of the model are elsewhere."""
        if self._has_parts_elsewhere:
            raise DrumlineError(
                f"rank 0: a model with layers on other ranks or on disk cannot be {verb} from "
                f"here, as that would change a part of it only; {remedy}."
            )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model if it is there already; raise otherwise."""
        device, dtype = torch_private.parse_to(*args, **kwargs)
        own: torch.device = self.device  # type: ignore[attr-defined]
        there = device in (None, own) or (
            self._has_parts_elsewhere  # so that it stays where it was loaded
            and device == torch.device(own.type)  # without an index: the current one
            and own.index == torch.get_device_module(own).current_device()
        )
        if there and dtype in (None, getattr(self, "dtype", None)):
            return self
        return super().to(*args, **kwargs)  # type: ignore[misc]

    def cpu(self) -> Any:
        """As to("cpu")."""
        return self.to("cpu") if self._has_parts_elsewhere else super().cpu()  # type: ignore[misc]

    def cuda(self, device: Any = None) -> Any:
        """As to(device), by default the current GPU."""
        if self._has_parts_elsewhere:
            return self.to("cuda" if device is None else device)
        return super().cuda(device)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing if it is so already. The masks made here would not be those meant elsewhere."""
        if attn_implementation == attention_of(self.config):  # type: ignore[attr-defined]
            return
        self._refuse("given another attention", "load it with attn_implementation=")
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def _use_attention(self, name: str) -> None:
        """Have the layers of all ranks call this attention from the next pass on."""
        from drumline.contact.batching.paged_attention import register_attention

        register_attention()
        super().set_attn_implementation(name)  # type: ignore[misc]
        driver = getattr(self, "_driver", None)
        if driver is not None:
            self._pass_checks.accept()
            driver.record("use_attention", name)

    def __setattr__(self, name: str, value: Any) -> None:
        """model.forward = torch.compile(model.forward): generate() failed inside of the tracing."""
        if name == "forward" and torch_private.is_compiled(value):
            self._refuse("compiled", NOT_COMPILED)
        super().__setattr__(name, value)

    def outputs_to_keep(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but the cache, which is elsewhere: the result has None, as after a long recording."""
        return outputs if getattr(self, "_driver", None) is None else without_caches(outputs)

    def train(self, mode: bool = True) -> Any:
        if mode:
            self._refuse("trained", NO_TRAINING)
        return super().train(mode)  # type: ignore[misc]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad:
            self._refuse("trained", NO_TRAINING)
        return super().requires_grad_(requires_grad)  # type: ignore[misc]


def _refusing(name: str, verb: str, remedy: str) -> Callable[..., Any]:
    def method(self: UnsupportedMixin, *args: Any, **kwargs: Any) -> Any:
        self._refuse(verb, remedy)
        return getattr(super(UnsupportedMixin, self), name)(*args, **kwargs)

    return method


def _refusing_to_compile(mark: str) -> property:
    """torch.compile(model) reads it (OptimizedModule in torch/_dynamo/eval_frame.py), and tracing
    would end in an error after minutes."""

    def read(self: UnsupportedMixin) -> Any:
        self._refuse("compiled", NOT_COMPILED)
        raise AttributeError(mark)

    return property(read)


for _mark in torch_private.compile_marks:
    setattr(UnsupportedMixin, _mark, _refusing_to_compile(_mark))

for _name, _why in REFUSED_METHODS.items():
    setattr(UnsupportedMixin, _name, _refusing(_name, *_why))


def make_read_only(
    module: nn.Module,
    name: str,
    rank: int,
    unrecorded: UnrecordedOutputs | None = None,
    scale: Callable[..., None] | None = None,
    tied: Collection[str] = (),
) -> None:
    """Let nobody replace a module or weight inside `module`, which runs on another rank.

    What an adapter library or a quantizer puts there would never be called. unrecorded: extended.
    scale(rank, name, method, number): scales a weight there, if it is not `tied` to others.
    """
    unrecorded = [] if unrecorded is None else unrecorded
    for inner, tensor in make_weights_read_only(module, name, rank):
        tensor.__dict__["_scale"] = None if inner in tied else scale
    for inner, part in module.named_modules(prefix=name):
        kind = type(part)
        if isinstance(part, _ReadOnlyModule) or not torch_private.declares_parts(part):
            continue  # such as an activation, which may be the same object in all layers
        bases = (kind, _ReadOnlyModule) if kind is not nn.Module else (_ReadOnlyModule,)
        part.__dict__["_read_only_origin"], part.__dict__["_unrecorded"] = (inner, rank), unrecorded
        part.__class__ = mixed_class(kind, *bases)
        if part is not module:
            part.__dict__["forward"] = _RemoteForward(inner, rank)


def show_device(module: nn.Module, device: torch.device) -> None:
    """Let weights that are elsewhere say that they are on this device, where models ask them.

    Models move tokens to their tables of embeddings before they call these (Llama 4), and what
    these return to the device of their own first weight (Idefics 3); and it is from here that they
    do.
    """
    parts = [*module.modules()]
    tables = [part.weight for part in parts if isinstance(part, nn.Embedding)]
    firsts: list[Any] = [next(part.parameters(), None) for part in parts if is_model(part)]
    for weight in (*tables, *firsts):
        if isinstance(weight, _ReadOnlyTensor):
            weight.__dict__["_device"] = device


def make_weights_read_only(
    module: nn.Module, name: str, rank: int = 0
) -> list[tuple[str, torch.Tensor]]:
    """The weights of a module that are on another rank, or on disk: nobody can write into them."""
    tensors = [*module.named_parameters(name), *module.named_buffers(name)]
    away = [(inner, tensor) for inner, tensor in tensors if tensor.is_meta]
    for inner, tensor in away:
        _make_tensor_read_only(tensor, inner, rank)
    return away


class _RemoteForward:
    """The forward of a part of a layer: what is here of it has no weights."""

    def __init__(self, name: str, rank: int):
        self.name, self.rank = name, rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DrumlineError(
            f"rank 0: {self.name} is a part of a layer on rank {self.rank}, and only the whole "
            "layer can be called from here; give it to rank 0 in device_map to call it by itself."
        )


class _ReadOnlyModule(nn.Module):
    def register_forward_hook(self, hook: Any, **kwargs: Any) -> Any:
        self._refuse(hook)
        return super().register_forward_hook(hook, **kwargs)

    def register_forward_pre_hook(self, hook: Any, **kwargs: Any) -> Any:
        self._refuse(hook)
        return super().register_forward_pre_hook(hook, **kwargs)

    def _refuse(self, hook: Any) -> None:
        """transformers hooks every part at once, whichever of its outputs is asked for."""
        name, rank = self.__dict__["_read_only_origin"]
        if not isinstance(self.__dict__.get("forward"), _RemoteForward):
            return
        if (key := recorded_output(hook)) is not None:
            self.__dict__["_unrecorded"].append((key, name, rank))
        else:
            raise DrumlineError(
                f"rank 0: {name} is a part of a layer on rank {rank}, so a hook on it here would "
                "never be called; hook the whole layer, or give it to rank 0 in device_map."
            )

    def __setattr__(self, key: str, value: Any) -> None:
        now = self.__dict__.get(key)
        is_forward = key == "forward" and isinstance(now, _RemoteForward)
        # A number such as a scale; where nothing is dropped the rate of it does not matter.
        is_rate = isinstance(self, nn.Dropout) or "drop" in key
        is_number = type(now) is float and now != value and not is_rate
        if isinstance(value, (nn.Module, nn.Parameter)) or is_forward or is_number:
            name, rank = self.__dict__["_read_only_origin"]
            raise RemoteLayerError(
                f"rank 0: {name}.{key} runs on rank {rank}, so what is put in its place here would "
                "never be used. If the model does this itself, have its config say beforehand "
                f"what is to be there; for an adapter, {MERGE_ADAPTER}."
            )
        super().__setattr__(key, value)


def _place(rank: int) -> str:
    return f"rank {rank}" if rank else "disk"


def _description(tensor: Any, **kwargs: Any) -> str:
    name, rank = tensor.__dict__["_read_only_origin"]
    return f"<{name} of shape {tuple(tensor.shape)}, {tensor.dtype}, on {_place(rank)}>"


DEVICE_OF: Any = torch.Tensor.device.__get__


class _ReadOnlyTensor:
    """A weight without values here, or what was computed from one: whatever needs values raises,
    and so does what would write into it, for that would be lost silently."""

    __repr__: Any = _description

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """torch.save(model.state_dict()) would write a file without these values."""
        name, rank = self.__dict__["_read_only_origin"]
        raise DrumlineError(
            f"rank 0: {name} is on {_place(rank)}, so it cannot be saved or pickled from here, and "
            "a file without it could not be loaded; copy the checkpoint that it was loaded from."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == DEVICE_OF and (device := args[0].__dict__.get("_device")) is not None:
            return device
        read_only = [
            leaf
            for leaf in torch_private.tree_leaves((args, kwargs))
            if isinstance(leaf, _ReadOnlyTensor)
        ]
        first = (args or list(kwargs.values()))[:1]
        written = torch_private.tree_leaves([kwargs.get("out"), first if _writes(func) else None])
        for tensor in read_only:
            if any(tensor is leaf for leaf in written):
                name, rank = tensor.__dict__["_read_only_origin"]
                scale, numbers = tensor.__dict__["_scale"], args[1:]
                is_scaled = func.__name__ in SCALING_METHODS and not kwargs
                if scale and is_scaled and [type(n) in (int, float) for n in numbers] == [True]:
                    scale(rank, name, func.__name__, *numbers)
                    return tensor
                raise DrumlineError(
                    f"rank 0: {func.__name__} on {name}, which is on {_place(rank)}, would change "
                    "nothing there; write the weights that you want into a checkpoint and load "
                    "that, or give the layer to rank 0 in device_map."
                )
        try:
            with torch_private.plain_functions():
                result = func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:  # perhaps for want of values
            raise _lacks_values(func, read_only[0], error) from error
        # Some operations take a tensor on meta for one on the CPU with arbitrary values (matmul).
        takes_shape_only = "device" in kwargs or func.__name__.endswith("_as")
        for value in torch_private.tree_leaves(result):
            if type(value) is torch.Tensor and value.is_meta:  # a view, or computed from it
                _make_tensor_read_only(value, *read_only[0].__dict__["_read_only_origin"])
            elif isinstance(value, torch.Tensor) and not value.is_meta and not takes_shape_only:
                raise _lacks_values(func, read_only[0], "its result would be arbitrary")
        return result


def _lacks_values(func: Any, tensor: Any, why: object) -> DrumlineError:
    name, rank = tensor.__dict__["_read_only_origin"]
    return DrumlineError(
        f"rank 0: {func.__name__} failed with {name}, whose values are on {_place(rank)} ({why}); "
        "give that part to rank 0 in device_map, as nothing but a call of it works from here."
    )


class _ReadOnlyWeight(_ReadOnlyTensor, nn.Parameter):
    pass


class _ReadOnlyBuffer(_ReadOnlyTensor, torch.Tensor):
    pass


def _make_tensor_read_only(tensor: torch.Tensor, name: str, rank: int) -> None:
    tensor.__class__ = _ReadOnlyWeight if isinstance(tensor, nn.Parameter) else _ReadOnlyBuffer
    tensor.__dict__["_read_only_origin"], tensor.__dict__["_scale"] = (name, rank), None


def _writes(func: Any) -> bool:
    """True if it changes its first argument; in torch, such names end in "_"."""
    name: str = func.__name__
    if name == "__set__":
        return getattr(func.__self__, "__name__", "") == "data"
    if name.startswith("__i"):
        return hasattr(torch.Tensor, f"__{name[3:]}")  # such as __iadd__
    if name.startswith("__"):
        return name == "__setitem__"
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_", "detach_")
