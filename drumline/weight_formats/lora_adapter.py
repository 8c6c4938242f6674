"""A LoRA adapter, merged into each weight while that is read: W + B A alpha/r.

adapter = find_adapter(coor, "adapter", readers)              # as peft saves it
pieces, index = adapter.merged(model, pieces, files.index, dtype)

Low-Rank Adaptation: arXiv 2106.09685, equation 3. The sums are those of peft's merge.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from communicator import dtype_info
from coordinator import Coordinator
from drumline.checkpoint.headers.file_bounds import ADAPTER, FieldError
from drumline.checkpoint.json_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MERGE_ADAPTER,
    check_has_adapter,
    read_json,
)
from drumline.checkpoint.model_tensors import WeightSources, tied_names
from drumline.checkpoint.safetensors_index import (
    ComputedTensor,
    Index,
    StoredTensor,
    TensorReader,
    read_index,
)
from drumline.checkpoint.shard_plan import (
    SourceSlice,
    fills_exactly,
    parts_of,
    read_slices,
    whole_tensor,
)
from drumline.checkpoint.source import CheckpointFiles, share_index
from drumline.checkpoint.weight_map import dtype_overrides
from drumline.core.shards import Region
from drumline.errors import CheckpointError

PREFIX = "base_model.model."
FACTORS = re.compile(r"(.*)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
UNDERSTOOD = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "fan_in_fan_out", "init_lora_weights", "task_type", "lora_dropout"),
)
"""Fields of adapter_config.json that are followed here; peft sets fan_in_fan_out by the layer."""
OF_TRAINING: Mapping[tuple[type, ...], tuple[str, ...]] = {
    (str,): ("peft_version", "base_model_name_or_path", "revision", "megatron_core"),
    (dict,): (
        *("auto_mapping", "megatron_config", "runtime_config", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config"),
    ),
    (bool,): ("inference_mode", "ensure_weight_tying"),
    (int, float): ("qalora_group_size",),
}
"""Fields that change nothing of what a trained adapter does, by their types; null is none.

With any other field an adapter is refused.
"""
INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the weights of the model alone: pissa does not."""
DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Values of peft's LoraConfig."""
PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
"""Fields of adapter_config.json, and the fields whose values they have for some modules."""
BIASES = ("none", "all", "lora_only")
TASKS = (
    *(None, "SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS"),
    "FEATURE_EXTRACTION",
)
"""peft's TaskType, or none."""
ADAPTED = nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention
"""Modules that peft can adapt, beside transformers' Conv1D; it refuses a target of another kind."""
ALL_LINEAR = "all-linear"
NOT_LITERAL = {*r".^$*+?{}[]\|()"}  # letters with a meaning in a pattern
PIECE = r"\\[.dw]|\[\^?[^\]\\[]+\]|[^\\()\[\]{}|*+?^$]"
PATTERN_TOKEN = re.compile(
    rf"(?:{PIECE})(?P<repeat>[*+?]?)|(?P<group>\((?:\?:)?(?:{PIECE}|\|)*\))|[\^$]"
)
"""Parts of a pattern of names: a letter or class, repeated or not; a choice of words; an anchor."""
REPEATED_GROUP = re.compile(r"\)[*+]|\)\{\d*,\d*\}")
MAX_PATTERN_CHARS = 1000
MAX_MATCH_STEPS = 1_000_000_000
"""Of all patterns with all names, as they are counted here: about a second."""


def num_match_steps(pattern: str, length: int) -> int:
    """An upper bound of the steps in which `re` matches a pattern with a name of a length.

    Raises FieldError for a pattern in which what repeats is repeated, or looks around: the steps
    may double with every letter.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise FieldError(f"{pattern!r:.99} is longer than {MAX_PATTERN_CHARS} letters")
    ways, steps, at = length + 1, 0, 0  # the name may end with the pattern
    while at < len(pattern) and steps <= MAX_MATCH_STEPS:
        token = PATTERN_TOKEN.match(pattern, at)
        if token is None:
            raise FieldError(f"{pattern!r:.99} is not a plain pattern of names, at letter {at}")
        if group := token["group"]:
            ways *= group.count("|") + 1
        elif repeat := token["repeat"]:
            ways *= 2 if repeat == "?" else length + 1
        steps, at = steps + ways, token.end()
    return steps


def _is_target(module: str, settings: Mapping[str, Any], otherwise: bool = True) -> bool:
    """True if peft takes the module for one of an adapter's targets; check_target_module_exists.

    otherwise: as for _matches().
    """
    saved = settings.get("modules_to_save") or []
    layers = _as_list(settings.get("layers_to_transform"))
    is_saved = any(f".{name}." in f".{module}." for name in saved)
    if is_saved or _matches(module, settings.get("exclude_modules") or []):
        return False
    if not layers:
        return _matches(module, settings["target_modules"], otherwise)
    patterns = _as_list(settings.get("layers_pattern") or r"[^.]*")
    numbers = (re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module) for name in patterns)
    number = next(filter(None, numbers), None)
    return bool(
        number and int(number[1]) in layers and _matches(module, settings["target_modules"])
    )


def _is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D, which is a Linear with its weight transposed."""
    return type(module).__name__ == "Conv1D"


def _as_list(value: Any) -> list[Any]:
    """A setting that is one value, a list of them, or None for none."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _matches(module: str, names: Any, otherwise: bool = False) -> bool:
    """True for one of these names, the end of one, or a pattern.

    otherwise: for a pattern that may take long to match, with which it is not compared.
    """
    if isinstance(names, list):
        return any(f".{module}".endswith(f".{name}") for name in names)
    if not NOT_LITERAL & {*names} or names == ALL_LINEAR:
        return names in (module, ALL_LINEAR)
    try:
        is_cheap = num_match_steps(names, len(module)) <= MAX_MATCH_STEPS
        return bool(re.fullmatch(names, module)) if is_cheap else otherwise
    except FieldError:
        return otherwise


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as peft's get_pattern_key has it, for fullmatch()."""
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError) as error:
        raise FieldError(f"{pattern!r:.99} is not a pattern ({error})") from error


@dataclass(frozen=True, kw_only=True)
class MergedWeight(ComputedTensor):
    """A weight with its low-rank update. factors: B and A, which lie in the adapter's file.

    is_transposed: whether the product is, as where a layer multiplies from the right.
    """

    base: tuple[SourceSlice, ...]
    index: Index
    factors: tuple[StoredTensor, StoredTensor]
    scaling: float
    is_transposed: bool

    @property
    def parts(self) -> Sequence[StoredTensor]:
        base = parts_of(self.base, self.index)
        return [*base, *self.factors] if base else ()

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        read_slices(reader, self.index, self.base, region, out)
        rows, columns = zip(region.start, region.size, strict=True)
        if self.is_transposed:
            rows, columns = columns, rows
        b, a = self.factors
        b_box = Region((rows[0], 0), (rows[1], b.shape[1]))
        a_box = Region((0, columns[0]), (a.shape[0], columns[1]))
        update = reader.box(b, b_box).float() @ reader.box(a, a_box).float()
        out += (update.T if self.is_transposed else update) * self.scaling


@dataclass(frozen=True)
class LoraAdapter:
    """The file and the settings of an adapter, as all ranks know them."""

    files: CheckpointFiles
    settings: Mapping[str, Any]

    def merged(
        self, model: nn.Module, sources: WeightSources, index: Index, dtype: torch.dtype
    ) -> tuple[dict[str, tuple[SourceSlice, ...]], dict[str, StoredTensor]]:
        """The pieces of the model's tensors, and the index that they refer to, with the adapter.

        dtype: of the model. Raises CheckpointError for what has no place in the model, or is no
        update of one weight.
        """
        self._check_targets(model)
        pieces, extended = dict(sources), dict(index)
        tied = {name: names for names in tied_names(model).values() for name in names}
        factors: dict[str, dict[str, StoredTensor]] = {}
        for key, stored in self.files.index.items():
            if not key.startswith(PREFIX):
                raise self._error(f"has {key}, which peft would pass over: it is not {PREFIX}...")
            inside = replace(stored, file=str(self.files.path.resolve()))
            name = key.removeprefix(PREFIX).replace(".base_layer.", ".")  # of what has factors too
            if match := FACTORS.fullmatch(name):
                factors.setdefault(f"{match[1]}.weight", {})[match[2]] = inside
            else:  # trained as it is, and saved whole
                extended[key], pieces[name] = inside, whole_tensor(key, stored.shape)
        saved = self.settings.get("modules_to_save") or []
        for name in sources:
            if _matches(name.rpartition(".")[0], saved) and pieces[name] is sources[name]:
                raise self._error(f"has not {name}, which its modules_to_save name")
        for name in [*factors, *(pieces.keys() - sources.keys())]:
            if name not in sources:
                raise self._error(f"has {name}, for which the model has no place")
        for name in pieces:
            is_changed = pieces[name] is not sources[name] or name in factors
            if is_changed and len(tied[name]) > 1:
                raise self._error(f"changes one of {tied[name]}, which are tied")
        unmerged = dict(extended)
        merged = {
            name: self._merged_weight(model, name, pair, pieces[name], unmerged)
            for name, pair in factors.items()
        }
        wide = dtype_overrides(model, dtype)
        for name, weight in merged.items():
            key, own = f"{name} with its adapter", dtype_info(wide.get(name, dtype))
            extended[key] = replace(weight, dtype=str(own.safetensors))
            pieces[name] = whole_tensor(key, weight.shape)
        return pieces, extended

    def _check_targets(self, model: nn.Module) -> None:
        """Raise CheckpointError for a target that peft cannot adapt, as of the pattern ".*"."""
        if self.settings["target_modules"] == ALL_LINEAR:
            return
        for name, module in model.named_modules():
            is_adapted = isinstance(module, ADAPTED) or _is_conv1d(module)
            if not is_adapted and _is_target(name, self.settings, otherwise=False):
                raise self._error(
                    f"has target_modules that name {name or 'the model'} "
                    f"({type(module).__name__}), which has no update of low rank"
                )

    def _merged_weight(
        self,
        model: nn.Module,
        name: str,
        pair: Mapping[str, StoredTensor],
        base: tuple[SourceSlice, ...],
        index: Index,
    ) -> MergedWeight:
        module_name = name.removesuffix(".weight")
        if not _is_target(module_name, self.settings):
            raise self._error(f"has an update of {name}, which its target_modules do not name")
        module = model.get_submodule(module_name)
        shape = tuple(model.get_parameter(name).shape)
        # transformers' Conv1D multiplies from the right; so does an embedding, for peft.
        is_transposed = _is_conv1d(module) or isinstance(module, nn.Embedding)
        b, a = pair.get("B"), pair.get("A")
        if not a or not b:
            raise self._error(f"has not both lora_A and lora_B of {name}")
        r = int(self._setting("rank_pattern", module_name, "r"))
        if len(shape) != 2:
            raise self._error(f"has an update of {name}, which is not a matrix but {list(shape)}")
        columns, rows = shape if is_transposed else shape[::-1]
        if a.shape != (r, columns) or b.shape != (rows, r):
            raise self._error(
                f"has lora_A {list(a.shape)} and lora_B {list(b.shape)} for {name} {list(shape)}, "
                f"where r={r} makes them {[r, columns]} and {[rows, r]}"
            )
        if not fills_exactly(base, shape):
            raise self._error(f"has {name} {list(base[0].at.size)} in place of {list(shape)}")
        first = index[base[0].key]
        return MergedWeight(
            first.file,
            first.offset,
            first.dtype,
            shape,
            base=base,
            index=index,
            factors=(b, a),
            scaling=self._scaling(module_name, r),
            is_transposed=is_transposed,
        )

    def _scaling(self, module: str, r: int) -> float:
        """alpha/r, or alpha/sqrt(r) of rsLoRA (arXiv 2312.03732)."""
        alpha = float(self._setting("alpha_pattern", module, "lora_alpha"))
        return alpha / (math.sqrt(r) if self.settings.get("use_rslora") else r)

    def _setting(self, patterns: str, module: str, otherwise: str) -> Any:
        """The value of the first pattern that the module's name ends with, as peft matches it."""
        for pattern, value in self._compiled_patterns[patterns]:
            if pattern.fullmatch(module):
                return value
        return self.settings.get(otherwise, DEFAULTS[otherwise])

    @functools.cached_property
    def _compiled_patterns(self) -> dict[str, list[tuple[re.Pattern[str], Any]]]:
        return {
            name: [(_compiled(p), value) for p, value in (self.settings.get(name) or {}).items()]
            for name in PATTERNS
        }

    def check_settings(self) -> None:
        """Raise CheckpointError for an adapter that is more than low-rank updates of weights.

        Also for settings that no adapter can have.
        """
        kind, fields = self.settings.get("peft_type"), {*UNDERSTOOD, *sum(OF_TRAINING.values(), ())}
        surplus = sorted(
            name for name in self.settings if self.settings[name] and name not in fields
        )
        if (initialization := self.settings.get("init_lora_weights")) not in INITIALIZATIONS:
            surplus.append(f"init_lora_weights={initialization!r:.60}")
        if kind != "LORA" or surplus:
            raise self._error(f"is an adapter of the kind {' '.join([str(kind), *surplus]):.200}")
        try:
            self._check_words()
            self._check_numbers()
            _ = self._compiled_patterns
        except FieldError as error:
            raise CheckpointError(
                f"{self.files.path.with_name(ADAPTER_CONFIG)}: {error}, so what the "
                f"adapter changes is unknown; copy it again, or {MERGE_ADAPTER}."
            ) from error

    def _check_words(self) -> None:
        for types, names in OF_TRAINING.items():
            for name in names:
                if (value := self.settings.get(name)) is not None and type(value) not in types:
                    noun = " or ".join(kind.__name__ for kind in types)
                    raise FieldError(f"{name}={value!r:.60} is not of type {noun}")
        targets, saved = self.settings.get("target_modules"), self.settings.get("modules_to_save")
        excluded = self.settings.get("exclude_modules") or []
        for name, value in (("target_modules", targets), ("exclude_modules", excluded)):
            if not _is_list_of_names(value) and not isinstance(value, str):
                raise FieldError(f"{name}={value!r:.60} is neither names nor a pattern")
            if isinstance(value, str) and len(value) <= MAX_PATTERN_CHARS:
                _compiled(value)
        if isinstance(targets, str) and REPEATED_GROUP.search(targets):
            raise FieldError(f"target_modules={targets!r:.60} repeats a group, which may never end")
        if isinstance(excluded, str):
            self._count_steps("exclude_modules", [excluded])
        if saved is not None and not _is_list_of_names(saved):
            raise FieldError(f"modules_to_save={saved!r:.60} is not a list of names")
        if (bias := self.settings.get("bias", "none")) not in BIASES:
            raise FieldError(f"bias={bias!r:.60} is not one of {', '.join(BIASES)}")
        if (task := self.settings.get("task_type")) not in TASKS:
            raise FieldError(f"task_type={task!r:.60} is not one of peft's")
        self._check_layers(targets)

    def _check_layers(self, targets: Any) -> None:
        layers = self.settings.get("layers_to_transform")
        numbers = _as_list(layers)
        patterns = _as_list(self.settings.get("layers_pattern") or None)
        if not all(type(number) is int for number in numbers):
            raise FieldError(f"layers_to_transform={layers!r:.60} is not numbers of layers")
        if not _is_list_of_names(patterns) or not all(map(str.isidentifier, patterns)):
            raise FieldError(f"layers_pattern={patterns!r:.60} is not the name of a list of layers")
        if patterns and not numbers:
            raise FieldError("layers_pattern stands without layers_to_transform")
        if numbers and isinstance(targets, str):
            raise FieldError(f"layers_to_transform={layers!r:.60} stands beside a pattern of names")

    def _check_numbers(self) -> None:
        for name, default in DEFAULTS.items():
            ADAPTER[name].check(self.settings.get(name, default))
        if self.settings.get("use_rslora") not in (None, False, True):
            raise FieldError(
                f"use_rslora={self.settings['use_rslora']!r:.60} is neither true nor false"
            )
        for name, field in PATTERNS.items():
            by_pattern = self.settings.get(name, {})
            if not isinstance(by_pattern, dict):
                raise FieldError(f"{name}={by_pattern!r:.60} is not an object")
            for pattern, value in by_pattern.items():
                ADAPTER[field].check(value, f"{name}[{pattern!r:.60}]")
            self._count_steps(name, by_pattern)

    def _count_steps(self, name: str, patterns: Iterable[str]) -> None:
        """Raise FieldError if these patterns take long to match with the names of all modules."""
        longest = max(map(len, self.files.index), default=0)
        num_modules, num_steps = len(self.files.index) // 2 + 1, 0
        for pattern in patterns:
            num_steps += num_modules * num_match_steps(pattern, longest)
            if num_steps > MAX_MATCH_STEPS:
                raise FieldError(f"{name} takes too long to match, up to {pattern!r:.60}")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.files.path} {problem}, so it cannot be merged while the weights are read; "
            f"{MERGE_ADAPTER}."
        )


def find_adapter(
    coor: Coordinator, path: str | Path, base: CheckpointFiles
) -> tuple[LoraAdapter, CheckpointFiles]:
    """The adapter in a folder, and the checkpoint that it belongs to. Collective.

    It is the same on all ranks that read: both are compared, as long as the model is in use.
    """
    folder = Path(path)
    files, text = share_index(
        coor,
        folder / ADAPTER_FILE,
        lambda: base.readers,
        lambda: json.dumps(read_json(folder / ADAPTER_CONFIG)),
        _read_index,
    )
    adapter = LoraAdapter(files, json.loads(text))
    adapter.check_settings()
    return adapter, replace(base, copy_checks=(*base.copy_checks, *files.copy_checks))


def _read_index(file: Path) -> Index:
    check_has_adapter(file.parent)
    return read_index(file)
