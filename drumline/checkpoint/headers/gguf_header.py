"""The header of a GGUF file, read by a reader of our own and compared with the file's size.

header = read_gguf_header(Path("model.gguf"))
header.tensors["blk.0.attn_q.weight"].offset      # in the file, in bytes

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and what llama.cpp refuses in
it (gguf_init_from_file in ggml/src/gguf.cpp). Libraries get a summary of it, or read it after this.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from drumline.checkpoint.headers.file_bounds import (
    GGUF,
    GGUF_MODEL,
    MAX_ALIGNMENT,
    TOKEN_ID,
    FieldError,
)
from drumline.checkpoint.json_files import check_regular_file
from drumline.checkpoint.safetensors_index import FileState, file_state
from drumline.errors import CheckpointError

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
TOKENS, CHARACTERS = "tokenizer.ggml.tokens", "tokenizer.ggml.precompiled_charsmap"
PADDING = "tokenizer.ggml.padding_token_id"
NEEDED_WORDS = {f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown")}
"""Ids that are in the vocabulary; llama.cpp passes over others that are not, such as padding's."""
REQUIRED = ("block_count", "context_length", "embedding_length")
"""Fields without which llama.cpp loads no model; transformers takes another model's values."""


@dataclass(frozen=True)
class ArrayLength:
    """An array of a file whose elements were looked at and not kept."""

    length: int


@dataclass(frozen=True)
class GgufTensorInfo:
    """One tensor. shape: as torch orders it. offset: in the file. row_nbytes: of its last dim."""

    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    row_nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The fields by their keys, strings and numbers as they are, and the tensors by their names.

    summary: a file without the words and the data of the tensors, of which a config can be made.
    """

    architecture: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensorInfo]
    written: FileState
    summary: bytes


def import_gguf() -> Any:
    """The library gguf, of llama.cpp. Raises CheckpointError where it is not installed."""
    try:
        import gguf
    except ImportError as missing:
        raise CheckpointError(
            'GGUF files are read by the library gguf, which is not installed ("pip install gguf").'
        ) from missing
    return gguf


def read_gguf_header(file: Path) -> GgufHeader:
    """The header. Raises CheckpointError, which names the tensor or field, for one that lies."""
    block_sizes = {int(kind): sizes for kind, sizes in import_gguf().GGML_QUANT_SIZES.items()}
    try:
        check_regular_file(file)
        with file.open("rb") as stream:
            return _HeaderReader(stream, file_state(stream.fileno()), block_sizes).read()
    except (OSError, FieldError) as error:
        raise CheckpointError(
            f"{file} is not a whole GGUF file ({error}), so what it holds is unknown; copy it "
            "again."
        ) from error


@dataclass
class _HeaderReader:
    stream: BinaryIO
    written: FileState
    block_sizes: Mapping[int, tuple[int, int]]
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GgufTensorInfo] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)  # of all arrays with a bound
    parts: dict[str, bytes] = field(default_factory=dict)  # by their keys, of the summary

    def read(self) -> GgufHeader:
        if self._take(4, "magic") != b"GGUF":
            raise FieldError("it does not begin with GGUF")
        version = self._number("I", "version")
        if version and not version & 0xFFFF:
            raise FieldError(f"version={version}, of a machine of the other byte order")
        GGUF["version"].check(version)
        num_tensors = GGUF["tensor_count"].check(self._number("Q", "tensor_count"))
        num_fields = GGUF["kv_count"].check(self._number("Q", "kv_count"))
        for _ in range(num_fields):
            self._read_field()
        GGUF["split.count"].check(self.fields.get("split.count", 0))
        alignment = GGUF["general.alignment"].check(self.fields.get("general.alignment", 32))
        if alignment & (alignment - 1):
            raise FieldError(f"general.alignment={alignment} is not a power of two")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self._place(infos, alignment)
        architecture = self.fields.get("general.architecture")
        if not isinstance(architecture, str):
            raise FieldError(f"general.architecture is {architecture!r:.60} and no name")
        check_model_fields(architecture, self.fields, self.tensors)
        summary = _summary(version, self.parts, self.fields, self.tensors)
        return GgufHeader(architecture, self.fields, self.tensors, self.written, summary)

    def __post_init__(self) -> None:
        self.nbytes = self.written.nbytes

    def _take(self, nbytes: int, name: str) -> bytes:
        """So many bytes of a field, which the caller has bounded."""
        if nbytes > self.nbytes - self.stream.tell():
            raise FieldError(f"{name:.99} goes beyond the end of the file, {self.nbytes} bytes")
        data = self.stream.read(nbytes)
        if len(data) < nbytes:
            raise FieldError(f"{name:.99} is cut off: the file became shorter")
        return data

    def _number(self, code: str, name: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), name))[0]

    def _string(self, bound: str, name: str) -> str:
        length = GGUF[bound].check(self._number("Q", name), name)
        return _decoded(self._take(length, name), name)

    def _read_field(self) -> None:
        key = self._string("key length", f"key {len(self.fields)}")
        if key in self.fields:
            raise FieldError(f"the field {key:.99} appears twice")
        start = self.stream.tell()
        self.fields[key] = value = self._value(key, self._number("I", key))
        is_long = isinstance(value, str) and len(value) > GGUF["array length"].most
        if not is_long and not isinstance(value, ArrayLength):
            nbytes = self.stream.tell() - start
            self.stream.seek(start)
            self.parts[key] = _string_bytes(key) + self._take(nbytes, key)

    def _value(self, key: str, kind: int) -> Any:
        if kind == ARRAY:
            return self._array(key)
        if kind == STRING:
            return self._string("string length", key)
        if kind not in SCALARS:
            raise FieldError(f"{key:.99} is of type {kind}, which the format does not have")
        value = self._number(SCALARS[kind], key)
        if isinstance(value, float) and not math.isfinite(value):
            raise FieldError(f"{key:.99} is {value}")
        return value

    def _array(self, key: str) -> Any:
        kind = self._number("I", key)
        if kind != STRING and kind not in SCALARS:
            raise FieldError(
                f"{key:.99} is an array of type {kind}; only numbers and strings may be"
            )
        name = "number of words" if key.startswith("tokenizer.") else "array length"
        bound = GGUF["precompiled_charsmap" if key == CHARACTERS else name]
        left = bound.most - self.lengths.get(bound.name, 0)
        length = bound.check(self._number("Q", key), key, left)
        self.lengths[bound.name] = self.lengths.get(bound.name, 0) + length
        if kind == STRING:
            self._skip_strings(key, length)
            return ArrayLength(length)
        format = f"<{length}{SCALARS[kind]}"
        data = self._take(struct.calcsize(format), key)
        is_kept = bound.name == "array length"
        return list(struct.unpack(format, data)) if is_kept else ArrayLength(length)

    def _skip_strings(self, key: str, count: int) -> None:
        """Look at the strings of an array, which may be a million, each in a third of a us."""
        bound, read = GGUF["string length"], self.stream.read
        left = min(bound.most, self.nbytes - self.stream.tell())  # of all of them
        for _ in range(count):
            length = int.from_bytes(prefix := read(8), "little")
            if length > left:
                bound.check(length, key, left)
            data = read(length)
            left -= length
            if len(data) < length or len(prefix) < 8:
                raise FieldError(f"{key:.99} goes beyond the end of the file, {self.nbytes} bytes")
            if not data.isascii():
                _decoded(data, key)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string("name length", f"tensor {len(self.tensors)}")
        num_dims = GGUF["n_dims"].check(self._number("I", name), name)
        dims = [GGUF["dimension"].check(self._number("Q", name), name) for _ in range(num_dims)]
        return name, self._number("I", name), tuple(reversed(dims)), self._number("Q", name)

    def _place(self, infos: list[tuple[str, int, tuple[int, ...], int]], alignment: int) -> None:
        """The tensors follow each other in the order of the header, each padded."""
        begin, expected = _padded(self.stream.tell(), alignment), 0
        end = begin
        for name, kind, shape, offset in infos:
            if name in self.tensors:
                raise FieldError(f"the tensor {name} appears twice")
            if kind not in self.block_sizes:
                raise CheckpointError(
                    f"{self.stream.name}: {name} is of type {kind}, which the library gguf of this "
                    "rank does not know; give a file of another type, install another version of "
                    "gguf, or, if none knows it, copy the file again."
                )
            num_elements, block_nbytes = self.block_sizes[kind]
            if shape[-1] % num_elements:
                raise FieldError(
                    f"{name} has rows of {shape[-1]} elements, in blocks of {num_elements}"
                )
            if offset != expected:
                raise FieldError(f"{name} has offset={offset}, expected {expected}")
            row_nbytes = shape[-1] // num_elements * block_nbytes
            nbytes = math.prod(shape[:-1]) * row_nbytes
            end = begin + offset + nbytes
            if end > self.nbytes:
                raise FieldError(f"{name} ends at byte {end} of the file of {self.nbytes} bytes")
            self.tensors[name] = GgufTensorInfo(kind, shape, begin + offset, nbytes, row_nbytes)
            expected = _padded(offset + nbytes, alignment)
        if self.nbytes > begin + expected:
            raise FieldError(f"{self.nbytes - begin - expected} bytes follow its last tensor")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FieldError(f"{name:.99} is not UTF-8 ({error.reason})") from error


def _string_bytes(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _summary(
    version: int, parts: Mapping[str, bytes], fields: Mapping[str, Any], tensors: Iterable[str]
) -> bytes:
    """A GGUF file with some fields of another, the number of its words, and its tensors as scalars.

    For others' readers, which make an object of each word. transformers takes the number from
    either of two places, and the latter from any model whose own field does not follow. A
    padding outside the vocabulary is left out, as llama.cpp does.
    """
    if isinstance(words := fields.get(TOKENS), ArrayLength):
        has_padding = fields.get(PADDING) in range(words.length)
        parts = {key: part for key, part in parts.items() if has_padding or key != PADDING}
        keys = {TOKENS, "llama.vocab_size"} - {*fields} | {TOKENS}
        count = struct.pack("<II", 4, words.length)
        parts = {key: _string_bytes(key) + count for key in keys} | parts
    infos = [_string_bytes(name) + struct.pack("<IQIQ", 1, 1, 0, 0) for name in tensors]
    header = struct.pack("<4sIQQ", b"GGUF", version, len(infos), len(parts))
    return b"".join((header, *parts.values(), *infos, bytes(MAX_ALIGNMENT + 4)))


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def check_padding(fields: Mapping[str, Any]) -> None:
    """Raise FieldError for a padding outside the vocabulary, of which others make no tokenizer."""
    if PADDING in fields and isinstance(words := fields.get(TOKENS), ArrayLength):
        TOKEN_ID.check(fields[PADDING], PADDING, words.length - 1)


def check_model_fields(
    architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, GgufTensorInfo]
) -> None:
    """Raise FieldError for fields that no model can have, or not one with these tensors."""
    prefix = f"{architecture}."
    model_fields = {
        key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)
    }
    required = [*REQUIRED]
    has_epsilon = any(name.endswith("epsilon") for name in model_fields)
    if any("norm" in name for name in tensors) and not has_epsilon:
        required.append("attention.layer_norm_rms_epsilon")
    for name in required:
        if name not in model_fields:
            raise FieldError(f"it has no field {prefix}{name}")
    for name, value in model_fields.items():
        if bound := GGUF_MODEL.get(name):
            most = len(tensors) if name.endswith("block_count") else math.inf
            for number in value if isinstance(value, list) else [value]:  # one for each layer
                bound.check(number, prefix.rstrip("."), most)
    _check_heads(prefix, model_fields, tensors)
    _check_vocabulary(fields, tensors)
    positions = tensors.get("position_embd.weight")
    if positions and positions.shape[0] != model_fields["context_length"]:
        raise FieldError(
            f"{prefix}context_length={model_fields['context_length']}, but position_embd.weight "
            f"has the shape {list(positions.shape)}"
        )


def _check_heads(
    prefix: str, model_fields: Mapping[str, Any], tensors: Mapping[str, GgufTensorInfo]
) -> None:
    """Raise FieldError for attention of no head: others divide by their number."""
    heads = model_fields.get("attention.head_count", 0)
    with_heads = next(
        (name for name in tensors if ".attn_q.w" in name or ".attn_qkv.w" in name), ""
    )
    if with_heads and not max(heads if isinstance(heads, list) else [heads], default=0):
        raise FieldError(f"{prefix}attention.head_count={heads}, but there is {with_heads}")


def _check_vocabulary(fields: Mapping[str, Any], tensors: Mapping[str, GgufTensorInfo]) -> None:
    """Raise FieldError unless all that has one entry for each token has as many entries."""
    if TOKENS not in fields:
        return
    num_tokens = _array_length(fields, TOKENS)
    for name in ("scores", "token_type"):
        key = f"tokenizer.ggml.{name}"
        if key in fields and _array_length(fields, key) != num_tokens:
            raise FieldError(f"{key} has not one entry for each of {num_tokens} tokens")
    embedding = tensors.get("token_embd.weight")
    if embedding and embedding.shape[0] != num_tokens:
        raise FieldError(
            f"{TOKENS} has {num_tokens} entries, but token_embd.weight has the shape "
            f"{list(embedding.shape)}"
        )
    for key, value in fields.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if is_id and (key in NEEDED_WORDS or type(value) is not int):
            TOKEN_ID.check(value, key, num_tokens - 1)


def _array_length(fields: Mapping[str, Any], key: str) -> int:
    value = fields[key]
    if isinstance(value, ArrayLength):
        return value.length
    if not isinstance(value, list):
        raise FieldError(f"{key}={value!r:.60} is not an array")
    return len(value)
