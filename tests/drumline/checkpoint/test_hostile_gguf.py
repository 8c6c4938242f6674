"""GGUF files that lie: each is a CheckpointError that names the tensor or field."""

from __future__ import annotations

import random
import re
import time
import tracemalloc

import numpy
import pytest
import torch

pytest.importorskip("gguf", reason="runs after `pip install gguf`")
import drumline
from coordinator import Coordinator
from drumline import CheckpointError
from drumline.checkpoint.config_files import read_tokenizer
from drumline.checkpoint.headers.gguf_header import read_gguf_header
from drumline.contact.loading import configs
from drumline.weight_formats.gguf_file import open_gguf
from tests.drumline.checkpoint.gguf_bytes import (
    ARRAY,
    F32,
    I32,
    STRING,
    TENSOR_F16,
    TENSOR_F32,
    TENSOR_I32,
    TENSOR_Q4_0,
    TENSOR_Q8_0,
    U8,
    U32,
    U64,
    llama_parts,
)
from tests.drumline.checkpoint.hostile_files import GgufFuzzer
from tests.drumline.conftest import LLAMA

QUERY = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def whole(checkpoints):
    return llama_parts(small_llama(checkpoints))


def small_llama(checkpoints):
    sizes = {**LLAMA, "num_hidden_layers": 2}
    return checkpoints.make("llama of 2 layers", "LlamaForCausalLM", **sizes)[0]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def entry(parts, name=QUERY):
    return next(tensor for tensor in parts.tensors if tensor[0] == name)


def tensor(place, value, name=QUERY):
    """A change of one part of a tensor's entry: 0 its name, 1 dims, 2 type, 3 offset, 4 bytes."""

    def change(parts):
        entry(parts, name)[place] = value

    return change


def fields(key, kind, value):
    return lambda parts: parts.set(key, kind, value)


def attribute(name, value):
    return lambda parts: setattr(parts, name, value)


def without(key):
    return lambda parts: parts.remove(key)


def shifted(parts):
    for other in parts.tensors[1:]:
        other[3] += 32
    parts.tensors[0][4] += bytes(32)


def exchanged(parts):
    parts.tensors[2], parts.tensors[1] = parts.tensors[1], parts.tensors[2]


def twice(parts):
    parts.fields.append(["llama.block_count", U32, 2])


def tensor_twice(parts):
    entry(parts)[0] = "blk.0.attn_k.weight"


def half_blocks(parts):
    entry(parts)[1:3] = [[8, 128], TENSOR_Q8_0]


def many_fields(parts):
    parts.fields += [[f"x.{number}", U8, 0] for number in range(2000)]


def many_tensors(parts):
    parts.tensors += [[f"x.{number}", [1], TENSOR_F32, 0, b""] for number in range(9000)]


def later_file(parts):
    parts.set("split.count", 2, 3)
    parts.remove("general.architecture")


def many_arrays(parts):
    parts.fields += [[f"x.{number}", ARRAY, array_of(U8, 4000, bytes(4000))] for number in (1, 2)]


def nested(count):
    """An array of arrays, which claims so many."""
    return (U8).to_bytes(4, "little") + count.to_bytes(8, "little")


def array_of(kind, count, data=b""):
    return kind.to_bytes(4, "little") + count.to_bytes(8, "little") + data


HUGE = (1 << 40, 1 << 62, (1 << 64) - 1)
LIES = {
    "another magic": (attribute("magic", b"GGUX"), "does not begin with GGUF"),
    "version 1": (attribute("version", 1), "version=1"),
    "version 2 ** 31": (attribute("version", 1 << 31), "other byte order"),
    "no tensors": (attribute("tensors", []), "tensor_count=0"),
    "too few tensors": (attribute("num_tensors", 3), "bytes follow"),
    "one tensor too many": (attribute("num_tensors", 22), r"tensor \d+"),
    "one field too few": (attribute("num_fields", 14), "tensor|token"),
    "one field too many": (
        attribute("num_fields", 16),
        "tensor|token",
    ),
    "a negative offset": (tensor(3, -64), f"{QUERY} has offset=18446744073709551552"),
    "an offset of another": (tensor(3, 0), f"{QUERY} has offset=0"),
    "a misaligned offset": (tensor(3, 8195), f"{QUERY} has offset=8195"),
    "an offset beyond the end": (tensor(3, 1 << 50), f"{QUERY} has offset="),
    "an offset of 2 ** 63": (tensor(3, 1 << 63), f"{QUERY} has offset="),
    "a gap": (shifted, "has offset=8224, expected 8192"),
    "another order": (exchanged, "has offset="),
    "a shorter type": (tensor(2, TENSOR_Q4_0), "has offset=12288, expected"),
    "half the size": (tensor(2, TENSOR_F16), "has offset=12288, expected"),
    "the last one shorter": (tensor(2, TENSOR_F16, "output.weight"), "4096 bytes follow its last"),
    "the last one longer": (tensor(1, [32, 65], "output.weight"), "output.weight ends at byte"),
    "a type nobody has": (tensor(2, 99), f"{QUERY} is of type 99"),
    "a type of the past": (tensor(2, 4), f"{QUERY} is of type 4"),
    "a type of 2 ** 31": (tensor(2, 1 << 31), f"{QUERY} is of type 2147483648"),
    "rows of half a block": (half_blocks, f"{QUERY} has rows of 8 elements, in blocks of 32"),
    "no dims": (tensor(1, []), f"{QUERY} has n_dims=0"),
    "five dims": (tensor(1, [32, 32, 1, 1, 1]), f"{QUERY} has n_dims=5"),
    "dims without end": (tensor(1, [1] * 1000), f"{QUERY} has n_dims=1000"),
    "a dim of 0": (tensor(1, [0, 32]), f"{QUERY} has dimension=0"),
    "a negative dim": (tensor(1, [-32, -32]), f"{QUERY} has dimension=18446744073709551584"),
    "dims with a product of 0": (tensor(1, [1 << 33, 1 << 33]), f"{QUERY} ends at byte|expected"),
    "a name twice": (tensor_twice, "blk.0.attn_k.weight appears twice"),
    "no name": (tensor(0, ""), "name length=0"),
    "a long name": (tensor(0, "x" * 65), "name length=65"),
    "a name that is not a text": (tensor(0, b"\xff\xfe"), "not UTF-8"),
    "a field twice": (twice, "llama.block_count appears twice"),
    "a field of no type": (fields("llama.block_count", 13, b""), "llama.block_count is of type 13"),
    "an array of arrays": (
        fields("x", ARRAY, array_of(ARRAY, 1 << 20, nested(1 << 20))),
        "x is an array of type 9",
    ),
    "an array of no type": (fields("x", ARRAY, array_of(77, 4)), "x is an array of type 77"),
    "no power of two": (fields("general.alignment", U32, 48), "general.alignment=48"),
    "no alignment": (fields("general.alignment", U32, 0), "general.alignment=0"),
    "a large alignment": (
        fields("general.alignment", U32, 1 << 31),
        "general.alignment=2147483648",
    ),
    "an alignment in words": (fields("general.alignment", STRING, "32"), "general.alignment='32'"),
    "no architecture": (without("general.architecture"), "general.architecture is None"),
    "an architecture of numbers": (fields("general.architecture", U32, 3), "general.architecture"),
    "a field that is not a text": (
        fields("general.name", STRING, b"\xff"),
        "general.name|type|beyond",
    ),
    "no layers": (fields("llama.block_count", U32, 0), "llama has block_count=0"),
    "2 ** 31 layers": (fields("llama.block_count", U32, 1 << 31), "block_count=2147483648"),
    "2 ** 60 layers": (
        fields("llama.block_count", U64, 1 << 60),
        "block_count=1152921504606846976",
    ),
    "1000 layers": (fields("llama.block_count", U32, 1000), "block_count=1000.*from 1 to 21"),
    "layers in words": (fields("llama.block_count", STRING, "6"), "block_count='6'"),
    "layers in fractions": (fields("llama.block_count", F32, 6.0), "block_count=6.0"),
    "no heads": (fields("llama.attention.head_count", U32, 0), "attention.head_count=0"),
    "a negative head": (fields("llama.attention.head_count", I32, -4), "attention.head_count=-4"),
    "2 ** 31 positions": (
        fields("llama.context_length", U32, 1 << 31),
        "context_length=2147483648",
    ),
    "an epsilon that is not a number": (
        fields("llama.attention.layer_norm_rms_epsilon", F32, float("nan")),
        "layer_norm_rms_epsilon is nan",
    ),
    "a negative epsilon": (
        fields("llama.attention.layer_norm_rms_epsilon", F32, -1.0),
        "layer_norm_rms_epsilon=-1.0",
    ),
    "no epsilon": (
        without("llama.attention.layer_norm_rms_epsilon"),
        "no field llama.attention.layer_norm_rms_epsilon",
    ),
    "no number of layers": (without("llama.block_count"), "no field llama.block_count"),
    "infinite rope": (fields("llama.rope.freq_base", F32, float("inf")), "llama.rope.freq_base is"),
    "one of several files": (fields("split.count", 2, 3), "split.count=3"),
    "a later one of several files": (later_file, "split.count=3.*merged by llama-gguf-split"),
    "more words than rows": (
        fields("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"] * 65)),
        "not one entry for each of 65 tokens",
    ),
    "words that are a number": (fields("tokenizer.ggml.tokens", U32, 3), "is not an array"),
    "an end that is not a word": (
        fields("tokenizer.ggml.eos_token_id", U32, 64),
        "tokenizer.ggml.eos_token_id has token id=64",
    ),
    "fields by the thousand": (many_fields, "kv_count=2015"),
    "tensors by the thousand": (many_tensors, "tensor_count=9021"),
    "numbers that are there": (
        fields("x", ARRAY, array_of(U8, 5000, bytes(5000))),
        "x has array length=5000",
    ),
    "arrays that are there": (many_arrays, "x.2 has array length=4000, .* from 0 to 96"),
    "merges that are there": (
        fields("tokenizer.ggml.merges", ARRAY, array_of(STRING, 3 << 20, bytes(24 << 20))),
        "tokenizer.ggml.merges has number of words=3145728",
    ),
    "characters that are there": (
        fields("tokenizer.ggml.precompiled_charsmap", ARRAY, array_of(U8, 1 << 19, bytes(1 << 19))),
        "precompiled_charsmap=524288",
    ),
    "bytes behind the end": (attribute("tail", bytes(64)), "64 bytes follow"),
}
for count in HUGE:
    LIES |= {
        f"{count} tensors": (attribute("num_tensors", count), f"tensor_count={count}"),
        f"{count} fields": (attribute("num_fields", count), f"kv_count={count}"),
        f"{count} words": (
            fields("x", ARRAY, array_of(STRING, count)),
            f"x has array length={count}",
        ),
        f"{count} numbers": (
            fields("x", ARRAY, array_of(U8, count)),
            f"x has array length={count}",
        ),
        f"{count} letters": (
            fields("x", STRING, count.to_bytes(8, "little")),
            f"x has string length={count}",
        ),
    }


@pytest.mark.parametrize("name", LIES)
def test_what_lies_is_named_within_a_second(whole, file, name):
    """Offsets gave other weights, counts hung, and errors were those of libraries."""
    change, problem = LIES[name]
    parts = whole.copy()
    change(parts)
    file.write_bytes(parts.to_bytes())
    start = time.process_time()
    with pytest.raises(CheckpointError, match=rf"model\.gguf.*({problem})"):
        open_gguf(file)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        read_tokenizer(file)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("name", ["padding", "seperator"])
def test_a_padding_outside_the_vocabulary_is_left_out(whole, file, name):
    """Such files, which llama.cpp takes, were said not to be whole."""
    parts = whole.copy()
    parts.set(f"tokenizer.ggml.{name}_token_id", U32, 2**32 - 1)
    file.write_bytes(parts.to_bytes())
    assert open_gguf(file).config.pad_token_id is None
    parts.set("tokenizer.ggml.padding_token_id", U32, 3)
    file.write_bytes(parts.to_bytes())
    assert open_gguf(file).config.pad_token_id == 3


def test_a_tokenizer_with_a_padding_outside_its_vocabulary_is_refused_by_name(whole, file):
    parts = whole.copy()
    parts.set("tokenizer.ggml.padding_token_id", U32, 2**32 - 1)
    file.write_bytes(parts.to_bytes())
    with pytest.raises(CheckpointError, match=r"padding_token_id has token id=4294967295"):
        read_tokenizer(file)


def test_a_type_that_the_library_does_not_know_is_no_damage(whole, file):
    parts = whole.copy()
    tensor(2, 200)(parts)
    file.write_bytes(parts.to_bytes())
    with pytest.raises(
        CheckpointError, match=rf"{QUERY} is of type 200, .* another version of gguf"
    ):
        open_gguf(file)


def renamed(parts):
    entry(parts)[0] = "blk.0.attn_qq.weight"


def with_bias(parts):
    parts.add("blk.0.attn_q.bias", numpy.zeros(32))


def transposed(parts):
    entry(parts, "blk.1.attn_k.weight")[1] = [16, 32]


def flat(parts):
    entry(parts, "blk.1.ffn_up.weight")[1] = [64 * 32]


OTHER_MODELS = {
    "a layer less": (fields("llama.block_count", U32, 1), "blk.1.attn_q.weight"),
    "a layer more": (fields("llama.block_count", U32, 3), "missing"),
    "a tensor of another name": (renamed, "blk.0.attn_qq.weight, for which"),
    "a tensor more": (with_bias, "blk.0.attn_q.bias, for which"),
    "a transposed tensor": (transposed, "blk.1.attn_k.weight"),
    "a tensor of one dim": (flat, r"blk.1.ffn_up.weight \[2048\] where model.layers.1.mlp.up_proj"),
    "less heads": (fields("llama.attention.head_count", U32, 2), "blk.0.attn_k.weight"),
    "another width": (fields("llama.embedding_length", U32, 64), "token_embd.weight"),
    "another model": (
        fields("general.architecture", STRING, "llamb"),
        "no field llamb.block_count",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_file_of_another_model_than_it_says_is_refused(whole, file, ranks_or_errors, name):
    """Surplus tensors were left out without a word."""
    change, problem = OTHER_MODELS[name]
    parts = whole.copy()
    change(parts)
    file.write_bytes(parts.to_bytes())
    (error,) = ranks_or_errors(loading(file), 1)
    assert isinstance(error, CheckpointError), error
    assert re.search(rf"model\.gguf.*{problem}", str(error)), error


def loading(file):
    def rank(info):
        with Coordinator(info, timeout_s=30) as coor, drumline.load(file, coor=coor) as model:
            return {name: weight.clone() for name, weight in model.named_parameters()}

    return rank


def test_a_file_that_does_not_lie_is_loaded_with_its_words(whole, file, checkpoints, ranks):
    file.write_bytes(whole.to_bytes())
    plain = dict(small_llama(checkpoints).named_parameters())
    (weights,) = ranks(loading(file), 1)
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_the_merges_and_the_characters_of_a_vocabulary_are_no_lie(whole, file):
    parts = whole.copy()
    merges = array_of(STRING, 3 * 64, bytes(8 * 3 * 64))
    parts.set("tokenizer.ggml.merges", ARRAY, merges)
    parts.set("tokenizer.ggml.precompiled_charsmap", ARRAY, array_of(U8, 240_000, bytes(240_000)))
    file.write_bytes(parts.to_bytes())
    assert read_gguf_header(file).fields["tokenizer.ggml.precompiled_charsmap"].length == 240_000


def test_a_vocabulary_costs_no_object_for_each_word(whole, file):
    """262,144 tokens with their merges took the library's reader 50 seconds."""
    parts = whole.copy()
    parts.set("tokenizer.ggml.merges", ARRAY, array_of(STRING, 500_000, bytes(8 * 500_000)))
    file.write_bytes(parts.to_bytes())
    open_gguf(file)  # what it imports takes time, too
    start = time.process_time()
    open_gguf(file)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("key", ["llama.vocab_size", "gpt2.vocab_size", None])
def test_config_and_words_of_a_summary_are_those_of_the_file(whole, file, key):
    parts = whole.copy()
    parts.remove("llama.vocab_size")
    if key:
        parts.set(key, U32, 80)
    file.write_bytes(parts.to_bytes())
    config, plain = open_gguf(file).config, configs.read_config(file.parent, gguf_file=file.name)
    assert vars(config) == vars(plain) and config.vocab_size == (
        80 if key == "llama.vocab_size" else 64
    )
    words = [
        tokenizer.backend_tokenizer.to_str()
        for tokenizer in (
            read_tokenizer(file),
            configs.read_tokenizer(file.parent, gguf_file=file.name),
        )
    ]
    assert words[0] == words[1]


def test_a_type_that_cannot_be_made_numbers_of_is_named(whole, file, ranks_or_errors):
    """It was a NotImplementedError of the library, as the weights were read."""
    parts = whole.copy()
    entry(parts)[2] = TENSOR_I32
    file.write_bytes(parts.to_bytes())
    (error,) = ranks_or_errors(loading(file), 1)
    assert isinstance(error, CheckpointError) and f"{QUERY} is of type I32" in str(error)


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_whatever_a_file_says_its_tensors_lie_in_it_one_after_the_other(whole, file, count):
    """No claimed size is allocated, no case takes long, and no error is of another kind."""
    seed = 1 if count < 10_000 else random.randrange(1 << 32)
    fuzzer = GgufFuzzer(random.Random(seed), whole)
    num_refused = 0
    tracemalloc.start()
    try:
        for number in range(count):
            data = fuzzer.damaged()
            file.write_bytes(data)
            tracemalloc.reset_peak()
            start = time.process_time()
            try:
                header = read_gguf_header(file)
            except CheckpointError as error:
                assert str(file) in str(error)
                num_refused += 1
            else:
                check_tiles(header, len(data), f"seed {seed}, number {number}")
            assert time.process_time() - start < 1, (seed, number)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20, (seed, number)
    finally:
        tracemalloc.stop()
    assert count / 2 < num_refused < count


def check_tiles(header, nbytes, case):
    """The tensors are in the file, and between them is less than the alignment."""
    end = None
    for tensor in header.tensors.values():
        assert end is None or 0 <= tensor.offset - end < header.fields.get("general.alignment", 32)
        end = tensor.offset + tensor.nbytes
        assert 0 <= tensor.offset < end <= nbytes, case
    assert header.tensors, case
