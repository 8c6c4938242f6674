"""Verbs over classes of models: which there are, how one is built, and what it says of itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.contact import transformers_api as api
from drumline.contact.caches import is_of_transformers
from drumline.contact.loading.configs import experts_of

ANY_MODEL = "AutoModel"
"""The class by which a script loads a model of a kind that its checkpoint does not name."""


def model_class_named(name: str) -> type[Any] | None:
    """The class of models with this name in transformers; None if it has none."""
    cls = getattr(api.transformers, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, api.PreTrainedModel) else None


def model_class_of(config: Any) -> type[Any] | None:
    """The class that transformers' AutoModels make of this type of config; None if there is none.

    That of language models before the others, as a checkpoint to generate with is the rule.
    """
    mappings = [api.MODEL_FOR_CAUSAL_LM_MAPPING, api.MODEL_FOR_MULTIMODAL_LM_MAPPING]
    if config.is_encoder_decoder:
        mappings = [api.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    kinds = next((m[type(config)] for m in [*mappings, api.MODEL_MAPPING] if type(config) in m), ())
    return next(iter(kinds), None) if isinstance(kinds, (list, tuple)) else kinds


def is_made_for(cls: type[Any], config: Any) -> bool:
    """True if a class of models takes this type of config, or that of a part of it."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    takes = getattr(cls, "config_class", None)
    fits = takes is None or any(isinstance(part, takes) for part in parts)
    return fits or cls is model_class_of(config)


def causal_class_reference(auto_map: Mapping[str, str]) -> str | None:
    """The class for language models that a checkpoint's own code has, as its auto_map says."""
    return auto_map.get("AutoModelForCausalLM")


def class_from_code(reference: str, folder: Path) -> type[Any]:
    """The class that Python files of a checkpoint define, which are run. reference: as auto_map."""
    cls: type[Any] = api.dynamic_module_utils.get_class_from_dynamic_module(reference, folder)
    return cls


def loading_options(cls: type[Any]) -> set[str]:
    """The names of options that loading knows, or the constructor of `cls`."""
    code = inspect.unwrap(api.PreTrainedModel.from_pretrained).__code__
    names = [name for c in code.co_consts for name in (c if isinstance(c, tuple) else (c,))]
    accepted = {*names, *code.co_varnames, *inspect.signature(cls).parameters}
    return accepted | {"attn_implementation", "experts_implementation"}


def run_experts_singly(model: Any) -> None:
    """Have each expert take its own matrix of the stack, and not an operation take the whole."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def runs_experts_singly(module: nn.Module) -> bool:
    """True for a stack of experts of which each takes its own matrix."""
    return _expert_functions(module) is not None and experts_of(module.config) == "eager"


def _expert_functions(module: nn.Module) -> Mapping[str, Any] | None:
    """The functions by name of which transformers runs a stack of experts with one: its forward
    holds them. None for other modules, and where a function of the user's is around that."""
    for cell in getattr(type(module).forward, "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, Mapping) and is_of_transformers(type(held).__module__):
            return held
    return None


def expert_gate(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function between the two products of a stack of experts, gate_up_proj and down_proj; None
    for other modules, for stacks that do something besides, or lie transposed, and for those that
    a function of the user's runs."""
    usual = {"has_gate": True, "is_transposed": False, "has_bias": False}
    usual["has_post_expert_norm"] = False
    is_usual = all(getattr(module, name, None) is value for name, value in usual.items())
    functions = _expert_functions(module) if is_usual else None
    if functions is None:
        return None
    name = experts_of(module.config)
    runs = name in ("eager", "batched_mm", "grouped_mm")
    if runs and (function := functions.get(name)) is not None:  # the user's, perhaps
        runs = is_of_transformers(str(getattr(function, "__module__", "")))
    return getattr(module, "_apply_gate", None) if runs else None


@contextlib.contextmanager
def loading_replaced(load: Callable[..., Any]) -> Iterator[None]:
    """Let load(cls, plain, path, *args, **options) load all models of the process meanwhile.

    plain: loads as transformers does, with the same arguments but `plain`.
    """
    original = api.PreTrainedModel.__dict__["from_pretrained"]

    @functools.wraps(original.__func__)  # loading_options looks there
    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        return load(cls, original.__func__, *args, **options)

    api.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        api.PreTrainedModel.from_pretrained = original


@contextlib.contextmanager
def no_code_prompt() -> Iterator[None]:
    """Let transformers refuse the code of a checkpoint at once, where it would ask on stdin.

    For one thread at a time. It raises ValueError; trust_remote_code=True still runs the code.
    """
    module = api.dynamic_module_utils
    timeout_s, module.TIME_OUT_REMOTE_CODE = module.TIME_OUT_REMOTE_CODE, 0
    try:
        yield
    finally:
        module.TIME_OUT_REMOTE_CODE = timeout_s


def build(cls: type[Any], config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """A model without weights of a checkpoint, on torch's default device."""
    return cls._from_config(config, dtype=dtype, **options)


def quantizer_of(config: Any, settings: Any = None) -> tuple[Any, Any]:
    """The quantizer that a model of this config is loaded with, or None, and the config for it.

    settings: of the user. Raises what transformers does where a package for it is missing.
    """
    quantizer, config, _ = api.get_hf_quantizer(config, settings, {"": "cpu"}, True, {})
    return quantizer, config


def why_not_quantized(config: Any) -> tuple[str, bool]:
    """The reason for which transformers cannot load weights as this config says they are quantized
    here, in words, nothing if it can; and True if it computes plain weights of them here."""
    try:
        quantizer, _ = quantizer_of(copy.deepcopy(config))
    except Exception as error:  # of a library that is missing, or of one that asks for a device
        return textwrap.shorten(str(error), 200) or type(error).__name__, False
    settings = getattr(quantizer, "quantization_config", None)
    return "", bool(getattr(settings, "dequantize", False))


def quantize_empty(quantizer: Any, model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the modules of a model on meta by quantized ones."""
    quantizer.preprocess_model(model, dtype=dtype, device_map={"": "cpu"}, use_kernels=False)


def whole_classes(model: nn.Module) -> Collection[str]:
    """The names of classes whose modules a model wants on one device; empty if it says none."""
    return getattr(model, "_no_split_modules", None) or ()


def shard_plan_of(model: nn.Module) -> dict[str, str]:
    """By pattern of a module's name, how the model wants it split over ranks."""
    return dict(getattr(model, "_tp_plan", None) or {})


def expert_plan_of(model: nn.Module) -> dict[str, str]:
    """By pattern of a name, how the model wants experts put on ranks of their own."""
    return dict(getattr(model, "_ep_plan", None) or {})


def keep_experts_apart(experts: Any) -> bool:
    """Tell a module of experts that it has some of them; False if it does not ask for that."""
    if not hasattr(experts, "_is_expert_parallel"):
        return False
    experts._is_expert_parallel = True
    return True


def are_some_experts(module: nn.Module) -> bool:
    """True if a module of experts was told that it has some of all, and skips others."""
    return bool(getattr(module, "_is_expert_parallel", False))


def dtype_plan(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """A function of a tensor's name: the dtype that the model wants for it in place of `dtype`."""
    plan = model._get_dtype_plan(dtype)
    patterns = [(re.compile(glob.replace("*", ".*")), wide) for glob, wide in plan.items()]
    return lambda name: next((wide for regex, wide in patterns if regex.search(name)), None)
