"""Checkpoints that somebody made to do harm, or that were damaged: each is a CheckpointError."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import shutil
import time

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    dynamic_module_utils,
)

import drumline
from coordinator import Coordinator
from drumline import CheckpointError
from drumline.checkpoint import json_files
from drumline.checkpoint.config_files import (
    _check_numbers,
    read_config,
    read_generation_config,
    read_tokenizer,
)
from drumline.checkpoint.headers.file_bounds import SAFETENSORS
from drumline.checkpoint.safetensors_index import TensorReader, read_index
from drumline.cli import main
from drumline.cli.run_script import run_script
from drumline.core.shards import Region
from drumline.planner.model_profile import build_on_meta, model_class
from drumline.strategies import pipeline_parallel
from drumline.strategies.opening import read_descriptions
from tests.programs.time_limit import seconds

TENSORS = {
    "first": torch.arange(1, 13, dtype=torch.float32).view(3, 4),
    "second": torch.arange(13, 19, dtype=torch.int16).view(2, 3),
    "third": torch.tensor(19.5),
    "none": torch.empty(0, 4),
}


def with_header(file, change):
    """Rewrite the header of a .safetensors file, and leave its data as they are."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_header_in_another_encoding_is_refused(file):
    """safetensors takes UTF-8 alone, and JSON of any encoding was read here."""
    with_header(file, lambda header: json.dumps(header).encode("utf-16"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        read_index(file.parent)


def entry(**fields):
    """A change of the header that puts these fields into its first tensor."""
    return lambda header: {**header, "first": {**header["first"], **fields}}


def without(field):
    def change(header):
        del header["first"][field]
        return header

    return change


NESTED = b'{"first": ' + 100_000 * b"[" + 100_000 * b"]" + b"}"
HEADERS = {
    "a negative shape": entry(shape=[-3, -4]),
    "a negative begin": entry(data_offsets=[-48, 0]),
    "an end before the begin": entry(data_offsets=[48, 0], shape=[-3, 4]),
    "one offset": entry(data_offsets=[0]),
    "no list of offsets": entry(data_offsets={"0": 0, "1": 48}),
    "fractions as offsets": entry(data_offsets=[0.0, 48.0]),
    "fractions as shape": entry(shape=[3.0, 4.0]),
    "booleans as shape": entry(shape=[True, 12]),
    "text as shape": entry(shape="34"),
    "a shape that no tensor can have": entry(shape=[1 << 64, 0], data_offsets=[0, 0]),
    "too many dimensions": entry(shape=(SAFETENSORS["dimensions"].most + 1) * [1]),
    "no shape": without("shape"),
    "no offsets": without("data_offsets"),
    "no dtype": without("dtype"),
    "a list as dtype": entry(dtype=["F32"]),
    "half a pair": entry(dtype="F4", shape=[1]),
    "no pair": entry(dtype="F4", shape=[]),
    "a tensor that is a number": lambda header: {**header, "first": 3},
    "a tensor that is a list": lambda header: {**header, "first": [0, 48]},
    "an end beyond the file": entry(data_offsets=[0, 1 << 40], shape=[1 << 38]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_tensor_that_cannot_be_is_named_with_its_file(file, name):
    """Two negative sizes were loaded as zeros, without a word; fractions were a TypeError."""
    with_header(file, HEADERS[name])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(first|second)"):
        read_index(file.parent)


@pytest.mark.parametrize("text", [NESTED, b"[]", b"3", b"\xff", b"", b"{", b'{"a": {}'])
def test_a_header_that_is_no_object_is_an_error_that_names_the_file(file, text):
    with_header(file, lambda header: text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_index(file.parent)


numbers = st.one_of(
    st.integers(-60, 60),
    st.sampled_from([1 << 31, 1 << 63, -(1 << 63), 1 << 200]),
    st.booleans(),
    st.floats(),
    st.none(),
    st.text(max_size=3),
)
fields = st.one_of(numbers, st.lists(numbers, max_size=4), st.dictionaries(st.text(), numbers))
sizes = st.lists(st.integers(-12, 12), max_size=3)
keys = st.sampled_from(["shape", "data_offsets", "dtype"])
dtypes = st.sampled_from(["F32", "I16", "F4", "F8_E8M0", "BOOL", "U64", "F128"])
mutations = st.one_of(
    st.tuples(st.sampled_from([*TENSORS, "new", "__metadata__"]), st.none(), fields),
    st.tuples(st.sampled_from([*TENSORS]), keys, fields),
    st.tuples(st.sampled_from([*TENSORS]), st.just("shape"), sizes),
    st.tuples(st.sampled_from([*TENSORS]), st.just("data_offsets"), sizes),
    st.tuples(st.sampled_from([*TENSORS]), st.just("dtype"), dtypes),
)


def mutate(header, mutation):
    name, key, value = mutation
    if key is None:
        header[name] = value
    elif isinstance(header[name], dict):
        header[name][key] = value


def read(folder, name, stored):
    """All of a tensor, read into memory that is full of something else."""
    out = torch.full((stored.nbytes,), 0xA5, dtype=torch.uint8)
    with TensorReader(folder) as reader:
        box = Region((0,) * len(stored.shape), stored.shape)
        reader.read(stored, box, out.view(stored.torch_dtype).view(stored.shape))
        assert reader.nbytes == stored.nbytes
    return out.numpy().tobytes()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(mutations, min_size=1, max_size=3))
def test_whatever_a_header_says_it_is_refused_or_the_bytes_of_the_file_are_read(file, changes):
    save_file(TENSORS, file)

    def change(header):
        for mutation in changes:
            mutate(header, mutation)
        return header

    with_header(file, change)
    header_end = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    data = file.read_bytes()[header_end:]
    with contextlib.suppress(CheckpointError):
        for name, stored in read_index(file.parent).items():
            said = json.loads(file.read_bytes()[8:header_end])[name]
            begin, end = said["data_offsets"]
            assert math.prod(said["shape"]) == math.prod(stored.shape) * (
                1 + (said["dtype"] == "F4")
            )
            assert min(said["shape"], default=0) >= 0
            assert read(file.parent, name, stored) == data[begin:end]


@given(st.binary(max_size=64))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_of_any_bytes_is_refused_or_holds_no_tensor(file, data):
    file.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        assert read_index(file.parent) == {}


def test_a_header_with_a_name_twice_is_refused(file):
    with_header(file, lambda header: json.dumps(header)[:-1].encode() + b', "first": {}}')
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*first appears twice"):
        read_index(file.parent)


def test_tensors_that_overlap_are_refused(file):
    with_header(file, lambda header: {**header, "again": header["first"]})
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*does not begin where"):
        read_index(file.parent)


def test_bytes_after_the_last_tensor_are_refused(file):
    file.write_bytes(file.read_bytes() + b"\0\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*2 bytes follow its last"):
        read_index(file.parent)


def test_a_pointer_of_git_lfs_is_named(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_index(file.parent)


def as_pipe(file):
    file.unlink()
    os.mkfifo(file)


def as_folder(file):
    file.unlink()
    file.mkdir()


def as_link_to_itself(file):
    file.unlink(missing_ok=True)
    file.symlink_to(file)


CHANGES = {
    "cut off": lambda file: os.truncate(file, 8),
    "removed": lambda file: file.unlink(),
    "a pipe": as_pipe,
    "a folder": as_folder,
    "a link to itself": as_link_to_itself,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_after_its_header_was_read_is_named(file, change):
    """The errors were those of the operating system, and a pipe was waited for without end."""
    index = read_index(file.parent)
    change(file)
    with seconds(10), pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(file.parent, "first", index["first"])


def test_a_file_that_is_cut_off_while_it_is_read_is_named(file):
    stored = read_index(file.parent)["first"]
    box, out = Region((0, 0), (3, 4)), torch.empty(3, 4)
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read at byte"),
        TensorReader(file.parent) as reader,
    ):
        reader.read(stored, box, out)
        os.truncate(file, stored.offset + 8)
        reader.read(stored, box, out)


def test_more_files_than_a_process_may_open_are_named(file, monkeypatch):
    """The advice was to copy the checkpoint again, or the error was of the operating system."""
    stored = read_index(file.parent)["first"]

    def full(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(file))

    monkeypatch.setattr(os, "open", full)
    box = Region((0, 0), (3, 4))
    for read in (TensorReader.map, TensorReader.box):
        with pytest.raises(CheckpointError, match=r"model.* cannot be opened .*ulimit -n"):
            read(TensorReader(file.parent), stored, box)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_is_cut_off_before_it_is_mapped_is_named(file, is_open):
    """The error was torch's, of a buffer that is too small, without the name of the file."""
    stored = read_index(file.parent)["first"]
    box, out = Region((0, 0), (3, 4)), torch.empty(3, 4)
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read"),
        TensorReader(file.parent) as reader,
    ):
        if is_open:
            reader.read(stored, box, out)
        os.truncate(file, stored.offset + 8)
        reader.map(stored, box)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_file_that_another_one_takes_the_place_of_while_it_is_read_is_named(file, how, is_open):
    """Parts of both, of the same shapes, were put together without a word."""
    stored, other = read_index(file.parent)["first"], file.with_name("other")
    save_file({**TENSORS, "first": -TENSORS["first"]}, other)
    os.utime(other, (1, 1))
    box, out = Region((0, 0), (3, 4)), torch.empty(3, 4)

    def load():
        with TensorReader(file.parent) as reader:
            if is_open:
                reader.read(stored, box, out)
            if how == "written to":
                file.write_bytes(other.read_bytes())
                os.utime(file, (2, 2))
            else:
                other.rename(file)
            reader.read(stored, box, out)

    if how == "replaced" and is_open:
        load()  # what it has opened is still there, under no name
        assert out.equal(TENSORS["first"])
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read"):
            load()


LISTINGS = [
    "[]",
    "3",
    "{}",
    '{"weight_map": 3}',
    '{"weight_map": {"first": 3}}',
    '{"weight_map": {"first": ["model.safetensors"]}}',
    '{"weight_map": {"first": null, "second": "model.safetensors"}}',
    '{"weight_map": [["first", "model.safetensors"]]}',
    '{"weight_map": {"first": "../model.safetensors"}}',
    '{"weight_map": {"first": "parts/../../model.safetensors"}}',
    '{"weight_map": {"first": "parts//model.safetensors"}}',
    '{"weight_map": {"first": ".."}}',  # the folder above was named, and not the index
    '{"weight_map": {"first": "/dev/zero"}}',
    100_000 * "[",
    "\0",
]


@pytest.mark.parametrize("text", LISTINGS)
def test_an_index_of_other_types_is_an_error_that_names_it(file, text):
    (file.parent / "model.safetensors.index.json").write_text(text)
    file.rename(file.parent / "part.safetensors")  # beside a whole file no listing is read
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read_index(file.parent)


@pytest.fixture
def llama(checkpoints, tmp_path):
    """A checkpoint with a tokenizer, to be damaged."""
    folder = tmp_path / "llama"
    shutil.copytree(checkpoints.llama()[1], folder)
    words = {str(number): number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="2").save_pretrained(folder)
    assert read_tokenizer(folder)("5 6")["input_ids"] and read_config(folder)
    return folder


def configured(folder, name="config.json", **fields):
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **fields}))


def read_both_configs(folder):
    read_descriptions(folder, read_config(folder))


def read_all(folder):
    """What every way to load or serve a model reads first."""
    read_both_configs(folder)
    read_tokenizer(folder)
    read_index(folder)


ENTRIES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
ENTRIES += ["tokenizer_config.json", "model.safetensors.index.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_pipe_in_place_of_a_file_is_an_error_at_once(llama, name, is_link):
    """Opening it waited for somebody to write, for ever."""
    (llama / name).unlink(missing_ok=True)
    pipe = llama.parent / "pipe" if is_link else llama / name
    os.mkfifo(pipe)
    if is_link:
        (llama / name).symlink_to(pipe)
    for read in (read_config, read_both_configs, read_tokenizer):
        with seconds(10), pytest.raises(CheckpointError, match=f"{name} is not an ordinary file"):
            read(llama)
    if name == "model.safetensors":
        with seconds(10), pytest.raises(CheckpointError, match=f"{name} is not an ordinary file"):
            read_index(llama)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_link_to_itself_is_an_error_that_names_its_place(llama, name):
    as_link_to_itself(llama / name)
    with pytest.raises(CheckpointError, match=str(llama)):
        read_all(llama)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "model.safetensors"])
def test_a_description_that_would_fill_the_memory_is_not_read(llama, name):
    """All of it was read, whatever its size."""
    (llama / name).touch()
    os.truncate(llama / name, 1 << 40)
    with seconds(10), pytest.raises(CheckpointError, match=f"{name} has {1 << 40} bytes"):
        read_all(llama)


@pytest.mark.skipif(not os.geteuid(), reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_an_error(llama):
    llama.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="may not be read by this user"):
            read_config(llama)
    finally:
        llama.chmod(0o700)


def test_files_that_are_links_and_folders_beside_them_are_as_ever(llama, tmp_path):
    """The cache of the Hub has links for files."""
    os.rename(llama / "model.safetensors", tmp_path / "blob")
    (llama / "model.safetensors").symlink_to(tmp_path / "blob")
    (llama / "onnx").mkdir()
    read_all(llama)


@pytest.mark.parametrize("count", [200_000, 10**12, 10**400])
def test_a_config_with_more_layers_than_there_are_tensors_is_refused_at_once(llama, count):
    """The empty model was built, layer by layer, until the memory or the patience ended."""
    configured(llama, num_hidden_layers=count)
    with seconds(10), pytest.raises(CheckpointError, match=r"config\.json has num_hidden_l"):
        read_config(llama)


def test_a_config_within_the_config_may_not_have_more_layers_either(llama):
    configured(llama, vision_config={"depth": 200_000})
    with seconds(10), pytest.raises(CheckpointError, match="depth=200000"):
        read_config(llama)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_config_with_more_labels_than_any_model_has_is_refused_at_once(llama, part):
    """transformers named each of them, until the memory ended."""
    configured(llama, **({part: {"num_labels": 10**9}} if part else {"num_labels": 10**9}))
    with seconds(10), pytest.raises(CheckpointError, match=r"config\.json has num_labels"):
        read_config(llama)


MANY = {
    "numbers": [1.0] * 200_000,
    "names": dict.fromkeys(map(str, range(200_000)), 1),
    "lists of lists": [[[0]] * 100] * 1000,
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "special_tokens_map.json"]
)
def test_a_description_with_more_values_than_any_has_is_refused_at_once(llama, name, kind):
    """transformers copied them again and again; only those of flat lists were counted."""
    configured(llama, name=name, x={"y": MANY[kind]})
    with seconds(10), pytest.raises(CheckpointError, match=f"{name} has number of values=2"):
        read_all(llama)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_lists_within_lists_are_refused_at_once(llama, name):
    """A list costs transformers as much as ten, where it is within as many: 194 s for 2 MB."""
    lists = functools.reduce(lambda value, _: [value], range(400), 0)
    configured(llama, name=name, x=[lists] * 100)
    with seconds(10), pytest.raises(CheckpointError, match=f"{name} .*is within 32 others"):
        read_all(llama)


def test_a_number_in_a_list_of_lists_is_named(llama):
    configured(llama, x=[[1, [2, math.nan]]])
    with pytest.raises(CheckpointError, match=r"config\.json has x=nan"):
        read_config(llama)


def test_a_large_file_that_nobody_reads_is_no_matter(llama):
    (llama / "trainer_state.json").write_text(json.dumps([[0]] * 200_000))
    for name in ("corpus.txt", "train.json"):
        (llama / name).touch()
        os.truncate(llama / name, 1 << 40)
    read_all(llama)


def test_a_description_is_counted_once(llama, monkeypatch):
    """It was read and counted twice where it is large."""
    counted, inner = [], json_files._check_num_values
    monkeypatch.setattr(json_files, "_check_num_values", lambda *a: (counted.append(a), inner(*a)))
    configured(llama, x="x" * 200_000)
    json_files.read_json(llama / "config.json")
    assert len(counted) == 1


def test_a_header_of_more_tensors_than_any_model_has_is_refused_at_once(file):
    """300,000 empty tensors took 16 s to be refused."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    many = {f"model.layers.{number}.weight": entry for number in range(300_000)}
    with_header(file, lambda header: many)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*number of values="):
        read_index(file.parent)
    assert time.process_time() - start < 1


def test_a_header_of_as_many_tensors_as_the_largest_models_have_is_read(file):
    entry = {"dtype": "BF16", "shape": [0, 5], "data_offsets": [0, 0]}
    many = {f"model.layers.{number}.weight": entry for number in range(100_000)}
    data = json.dumps(many).encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data)
    assert len(read_index(file.parent)) == 100_000


def test_an_index_of_more_files_than_any_model_has_is_refused_at_once(llama):
    """200,000 of them took 2 s."""
    weight_map = {str(number): f"{number}.safetensors" for number in range(200_000)}
    (llama / "model.safetensors").unlink()
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    start = time.process_time()
    with pytest.raises(CheckpointError, match=rf"{index.name}.*number of files=200000"):
        read_index(llama)
    assert time.process_time() - start < 1


def test_a_model_may_have_more_layers_than_tensors_where_layers_share_them(checkpoints):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 60, "vocab_size": 9, "embedding_size": 8}
    _, path = checkpoints.make("albert of 60", "AlbertForMaskedLM", **sizes)
    assert len(read_index(path)) < read_config(path).num_hidden_layers == 60


NUMBERS = [
    {"rms_norm_eps": float("nan")},
    {"rms_norm_eps": float("inf")},
    {"rms_norm_eps": -1e-5},
    {"num_attention_heads": -1},
    {"num_key_value_heads": 1 << 60},
    {"num_hidden_layers": -1},  # a model of no layers was loaded
    {"num_hidden_layers": 0},
    {"pad_token_id": 10**30},
    {"attention_dropout": 1.5},  # and so was this
    {"initializer_range": float("nan")},
    {"sliding_window": {}},
    {"num_attention_heads": "x"},  # these were an error of transformers, or of the model
    {"num_attention_heads": [2, -1]},
    {"rope_theta": [1e4]},  # loaded
    {"vocab_size": {"a": 1}},
    {"sliding_window": -1},  # was a RuntimeError of generate()
    {"query_pre_attn_scalar": -1},  # was a TypeError of it
    {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
]


@pytest.mark.parametrize("fields", NUMBERS)
def test_a_number_that_no_model_has_is_named(llama, fields):
    """A model of NaN was loaded without a word."""
    configured(llama, **fields)
    name = next(iter(fields.get("rope_parameters", fields)))
    with pytest.raises(CheckpointError, match=rf"config\.json has ({name}|rope_theta)="):
        read_config(llama)


def test_layers_with_a_window_of_no_size_are_refused(checkpoints):
    """They were a TypeError of the first pass."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 9, "hidden_size": 16, "intermediate_size": 16}
    kinds = ["sliding_attention", "full_attention"]
    _, path = checkpoints.make(
        "a window of no size", "Gemma3ForCausalLM", **sizes, layer_types=kinds
    )
    configured(path, sliding_window=None)
    with pytest.raises(CheckpointError, match=r"config\.json.*sliding_window is null"):
        read_config(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"pruned_heads": {"0": [1]}},
        {"num_hidden_layers": {"vision": 5}, "norm_topk_prob": True},
        {"intermediate_size": [16, None], "n_head": 2, "confidence_head": {"dropout": 0.1}},
        {"spatial_vision_layer": -1},  # its last letters are those of n_layer
        {"time_step_limit": [0.0, float("inf")]},
    ],
)
def test_values_that_models_have_are_not_refused(tmp_path, fields):
    """All default configs of transformers pass, in which these were seen."""
    save_file({"first": torch.zeros(1), "second": torch.zeros(1)}, tmp_path / "model.safetensors")
    _check_numbers(tmp_path, fields)


def test_a_name_with_two_values_is_refused(llama):
    """Which of them a reader takes is its own choice."""
    text = (llama / "config.json").read_text()
    (llama / "config.json").write_text(text.replace("{", '{"hidden_size": 64, ', 1))
    with pytest.raises(CheckpointError, match=r"config\.json.*hidden_size appears twice"):
        read_config(llama)


EVIL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "evil"
class Model(LlamaForCausalLM):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def willing(monkeypatch):
    """Somebody who answers yes to every question on stdin; the questions."""
    questions = []

    def answer(question=""):
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return questions


@pytest.fixture
def evil(llama, tmp_path):
    """A checkpoint whose config, model and tokenizer are its own code, which leaves a trace."""
    ran = tmp_path / "ran"
    (llama / "evil.py").write_text(EVIL.format(ran=str(ran)))
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    configured(llama, model_type="evil", architectures=["Model"], auto_map=classes)
    words = {"AutoTokenizer": [None, "evil.Words"]}
    configured(llama, "tokenizer_config.json", auto_map=words, tokenizer_class="Words")
    yield llama
    assert not ran.exists()


@pytest.mark.parametrize("read", [read_config, read_both_configs, read_tokenizer])
def test_the_code_of_a_checkpoint_is_not_run_and_nobody_is_asked_whether_it_may(
    evil, willing, read
):
    """With a "y" on stdin it ran on rank 0."""
    with pytest.raises(CheckpointError, match="brings Python code of its own"):
        read(evil)
    assert not willing


COMMANDS = {
    "plan": ["--memory", "1GiB"],
    "generate": ["--prompt", "5 6"],
    "bench": [],
    "serve": ["--port", "0"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_the_code_of_a_checkpoint(evil, willing, capsys, command):
    assert main([command, "--model", str(evil), *COMMANDS[command]]) == 1
    assert "brings Python code of its own" in capsys.readouterr().err and not willing


@pytest.mark.parametrize("options", [{}, {"tp": 1}, {"device_map": "fastest"}])
def test_load_does_not_run_the_code_of_a_checkpoint(evil, willing, ranks_or_errors, options):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(evil, coor=coor, **options)

    for error in ranks_or_errors(rank, 2 if not options else 1):
        assert isinstance(error, CheckpointError), error
        assert "brings Python code of its own" in str(error)
    assert not willing


def test_a_config_within_the_config_brings_no_code_either(llama, willing, tmp_path):
    """A model of several makes its parts with AutoModel, which asked as well."""
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(EVIL.format(ran=str(ran)))
    classes = {"AutoModel": f"{tmp_path}--evil.Model"}
    part = {"model_type": "blip_vision_model", "auto_map": classes}
    whole = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (llama / "config.json").write_text(json.dumps({**whole, "vision_config": part}))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        build_on_meta(LlavaForConditionalGeneration, read_config(llama), torch.float32)
    assert not willing and not ran.exists()


SCRIPT = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="auto")
"""


def test_a_script_is_not_asked_whether_the_code_of_a_checkpoint_may_run(
    evil, willing, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        run_script(str(tmp_path / "script.py"), [str(evil)])
    assert not willing
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0  # as it was


WORDS = ["{}", "[]", "3", "{", "\0", '{"model": 3}', '{"model": {}, "added_tokens": 3}']
WORDS += [100_000 * "[", '{"a": ' * 100_000, '{"version": "1.0", "model": {"type": "BPE"}}']


@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_of_garbage_is_an_error_that_names_its_files(llama, name, text):
    (llama / name).write_text(text)
    try:
        read_tokenizer(llama)
    except CheckpointError as error:
        assert name in str(error)
    else:
        assert name == "tokenizer_config.json"  # of which nothing is needed


@pytest.mark.parametrize("names", [5, [5], {"a": 1}, [None], [["LlamaForCausalLM"]], "Llama"])
def test_architectures_that_are_no_names_leave_the_class_to_the_model_type(llama, names):
    configured(llama, architectures=names)
    assert model_class(read_config(llama)).__name__ == "LlamaForCausalLM"


GENERATION = [
    "[]",
    100_000 * "[",
    '{"max_new_tokens": "x"}',
    '{"output_hidden_states": "0"}',  # was a TypeError of generate()
]


@pytest.mark.parametrize("text", GENERATION)
@pytest.mark.parametrize("options", [{}, {"tp": 2}])
def test_a_generation_config_of_garbage_is_an_error_on_every_rank(
    llama, ranks_or_errors, text, options
):
    (llama / "generation_config.json").write_text(text)

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(llama, coor=coor, **options)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError), error
        assert "generation_config.json" in str(error)


GENERATION_FIELDS = [
    ("do_sample", "yes", "true or false"),
    ("num_beams", "2", "an integer"),
    ("num_beams", True, "an integer"),
    ("top_k", 1 << 40, "an integer"),
    ("begin_suppress_tokens", 1, "a list of integers"),  # was a TypeError of generate()
    ("eos_token_id", [[1]], "an integer of 32 bits, or a list"),
    ("eos_token_id", [], "an integer of 32 bits, or a list"),  # was an IndexError of generate()
    ("temperature", math.nan, "a finite number"),
    ("guidance_scale", 10**30, "a finite number of 64 bits"),  # was an OverflowError
    ("assistant_early_exit", "0", "an integer"),  # which cut the model itself
    ("stop_strings", [3], "a text, or a list"),
    ("exponential_decay_length_penalty", {"0": 1}, "a list of two numbers"),
    ("sequence_bias", [[]], "a list of pairs"),  # was an IndexError of generate()
    ("sequence_bias", [None], "a list of pairs"),
    ("sequence_bias", [[[1], 1e300]], "a list of pairs"),  # infinite, as these are in 32 bits
    ("temperature", 1e-320, "a finite number, 0 or"),  # which 32 bits take for 0
    ("repetition_penalty", -1e-320, "a finite number, 0 or"),
    ("prefill_chunk_size", 0, "a positive integer"),  # was a RuntimeError of generate()
    ("cache_config", 1, "an object"),
]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(("name", "value", "noun"), GENERATION_FIELDS)
def test_a_generation_setting_of_another_type_is_named_with_its_file(
    llama, file, name, value, noun
):
    """generate() came to whatever its code did with it: TypeError, or another model."""
    if file == "config.json":
        (llama / "generation_config.json").unlink()
    configured(llama, file, **{name: value})
    with pytest.raises(CheckpointError, match=rf"/{file} .*{name}=.* not {noun}"):
        read_generation_config(llama)


def test_a_quantised_model_without_the_package_for_it_is_an_error(llama, ranks_or_errors):
    configured(llama, quantization_config={"quant_method": "nobody's", "bits": 4})

    def absent(*unused, **options):
        raise ImportError("install nobody's")

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor, pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.PreTrainedModel, "from_pretrained", absent)
            drumline.load(llama, coor=coor)

    (error,) = ranks_or_errors(rank, 1)
    assert isinstance(error, CheckpointError), error
    assert "install nobody's" in str(error)


def test_a_file_that_changes_on_one_rank_while_transformers_reads_it_is_named_on_all(
    llama, ranks_or_errors, tmp_path, monkeypatch
):
    """Only what drumline reads itself was compared with its state at the start."""
    configured(llama, quantization_config={"quant_method": "nobody's", "bits": 4})
    folders = [llama, tmp_path / "copy"]
    shutil.copytree(llama, folders[1])

    def read(kind, path, *unused, **options):
        if path == folders[1]:
            os.utime(path / "model.safetensors", (0, 0))
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(pipeline_parallel, "load_shard", read)

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(folders[coor.rank], coor=coor)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError), error
        assert "copy/model.safetensors changed while it was read" in str(error)


@pytest.fixture
def load_alone(ranks_or_errors):
    """Load a checkpoint on one rank: an error, or None if there is a model."""

    def load(folder, **options):
        def rank(info):
            with Coordinator(info, timeout_s=60) as coor:
                drumline.load(folder, coor=coor, **options).close()
                read_tokenizer(folder)

        return ranks_or_errors(rank, 1)[0]

    return load


def test_a_config_of_more_parameters_than_the_files_have_bits_is_refused(llama, load_alone):
    """It was said to lack a thousand times the memory of the machine."""
    configured(llama, intermediate_size=(1 << 31) - 1)
    error = load_alone(llama)
    assert isinstance(error, CheckpointError), error
    assert re.search(r"config\.json describes a model of \d+ parameters", str(error))


SENSELESS = [
    {"architectures": ["LlamaPreTrainedModel"]},
    {"base_model_tp_plan": 7},
    {"cache_implementation": "../x"},
    {"dtype": True},
    {"head_dim": -(1 << 63)},
    {"pad_token_id": 1 << 31},
    {"quantization_config": [1]},
    {"text_config": 0},
]


@pytest.mark.parametrize("options", [{}, {"tp": 1}], ids=["whole layers", "sharded"])
def test_fields_that_no_model_can_be_built_from_are_an_error_that_names_their_file(
    llama, load_alone, options
):
    """They were whatever the constructor of the model raised for them."""
    text = (llama / "config.json").read_text()
    for fields in SENSELESS:
        (llama / "config.json").write_text(text)
        configured(llama, **fields)
        error = load_alone(llama, **options)
        assert error is None or isinstance(error, drumline.DrumlineError), (fields, error)
        assert error is None or re.search(r"config\.json|model\.safetensors|/llama", str(error)), (
            fields
        )
