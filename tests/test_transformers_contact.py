"""transformers is touched in one module; a table says of every name why it is taken."""

import ast
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, WhisperForConditionalGeneration

from drumline.contact import transformers_api
from drumline.contact.loading import weights
from tests.programs.syntax_trees import loaded_by_name, nodes, trees
from tests.versions.taken_names import (
    BATCHING_NAMES,
    BATCHING_UNDERSCORES,
    RELEASES,
    TRANSFORMERS,
    UNDERSCORES,
)

CONTACT = Path("drumline/contact/transformers_api.py")

NAMES_AS_TEXT = {
    *("past_key_values", "cache_params", "is_conv_states_initialized"),
    *("is_recurrent_states_initialized", "has_previous_state", "cumulative_length", "record_past"),
    *("offloading", "is_updated", "self_attention_cache", "cross_attention_cache", "is_sliding"),
    *("conv_states", "recurrent_states", "max_cache_len", "sliding_window", "layer_types"),
    *("DynamicCache", "StaticCache", "QuantizedCache", "EncoderDecoderCache"),
    *("StaticLayer", "LinearAttentionCacheLayerMixin", "BaseQuantizedLayer", "KVSharingDict"),
    *("ModelOutput", "OutputRecorder", "MaxLengthCriteria", "EosTokenCriteria"),
    *("create_sliding_window_causal_mask", "create_chunked_causal_mask"),
    *("MergeModulelist", "Concatenate", "Chunk", "StaticSlidingWindowLayer"),
    *("AutoModel", "AutoModelForCausalLM", "layer_idx"),
}
"""Arguments, attributes of cache layers and classes that no type checker sees change."""


def imported(tree: ast.Module) -> set[str]:
    """The names of transformers that a module takes, by import or as attributes of it."""
    names, modules = set(), {n for n in loaded_by_name(tree) if n.split(".")[0] == "transformers"}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            ours = [a for a in node.names if a.name.split(".")[0] == "transformers"]
            modules |= {alias.asname or alias.name for alias in ours}
    used = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    return names | {node.attr for node in used if ast.unparse(node.value) in modules} | modules


def test_one_module_imports_transformers():
    assert imported(ast.parse("x = import_module('transformers.cache_utils')"))
    assert {path for path, tree in trees().items() if imported(tree)} == {CONTACT}


def test_only_verbs_of_the_contact_package_build_on_that_module():
    for path, tree in trees().items():
        if CONTACT.parent not in path.parents:
            imports = [n for n in nodes(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert "transformers_api" not in " ".join(map(ast.unparse, imports)), path


def test_each_name_has_a_reason_and_releases_that_were_read():
    taken = imported(trees()[CONTACT]) - {"transformers"}
    names = {**TRANSFORMERS, **BATCHING_NAMES}
    assert taken == set(names)
    for name, reason in names.items():
        assert len(reason.split()) > 3, name
    assert all(release.startswith("5.2") for release in RELEASES["transformers"])
    assert not [name for name in taken if name.startswith("_")]
    assert len(TRANSFORMERS) <= 30 and len(BATCHING_NAMES) <= 16


def test_what_batches_need_is_what_is_imported_for_them():
    batching = transformers_api.continuous_batching()
    assert vars(batching).keys() == BATCHING_NAMES.keys()


def spelled(tree: ast.Module) -> set[str]:
    """Attributes, keywords, methods and texts of a module, docstrings and all."""
    attributes = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    constants = [node.value for node in nodes(tree) if isinstance(node, ast.Constant)]
    keywords = {node.arg for node in nodes(tree) if isinstance(node, ast.keyword)}
    methods = {node.name for node in nodes(tree) if isinstance(node, ast.FunctionDef)}
    texts = {value for value in constants if isinstance(value, str)}
    return attributes | texts | keywords | methods


def test_names_with_an_underscore_and_classes_as_text_stay_in_the_contact_package():
    """An import cannot miss them, so one that is renamed must be found in one place."""
    reasons = {**UNDERSCORES, **BATCHING_UNDERSCORES}
    names = {*reasons, *weights.OPERATIONS}
    inside = set()
    for path, tree in trees().items():
        here = spelled(tree) & names
        if CONTACT.parent not in path.parents:
            assert not here, (path, here)
        elif path != CONTACT:
            inside |= here
    assert inside == names
    for reason in reasons.values():
        assert len(reason.split()) > 3, reason


def test_methods_of_transformers_with_an_underscore_are_overridden_in_the_contact_package_alone():
    """A method of a model that is no longer called raises nothing: a stop or a copy goes missing.

    A new name of ours that is by chance one of theirs would replace it, too."""
    kinds = (LlamaForCausalLM, WhisperForConditionalGeneration)
    names = {name for kind in kinds for name in dir(kind) if name.startswith("_")}
    names = {name for name in names if not hasattr(torch.nn.Module, name)}
    for path, tree in trees().items():
        classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
        methods = {part.name for node in classes for part in node.body if hasattr(part, "name")}
        if CONTACT.parent not in path.parents:
            assert not methods & names, path
        elif path.name == "model_hooks.py":
            assert methods & names == methods & UNDERSCORES.keys() != set()


def test_names_that_transformers_may_change_stand_in_the_contact_package_alone():
    """A parameter that was renamed made all batches slower, and no import had failed."""
    for path, tree in trees().items():
        if CONTACT.parent not in path.parents:
            assert not _words(tree) & NAMES_AS_TEXT, path


def _words(tree: ast.Module) -> set[str]:
    """Every identifier, attribute, argument and text of a module, docstrings left out."""
    words = set()
    for node in nodes(tree):
        for field in ("id", "attr", "arg", "name", "value"):
            word = getattr(node, field, None)
            words |= {word} if isinstance(word, str) else set()
    return words
