"""A GGUF file made of parts, each of which may lie."""

import struct
from dataclasses import dataclass, field, replace

import numpy

U8, U32, I32, F32, STRING, ARRAY, U64 = 0, 4, 5, 6, 8, 9, 10
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TENSOR_F32, TENSOR_F16, TENSOR_Q4_0, TENSOR_Q8_0, TENSOR_I32 = 0, 1, 2, 8, 26


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(kind, value):
    """value: bytes as they are; of an array, the type and the elements."""
    if isinstance(value, bytes):
        return value
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(
            value_bytes(inner, i) for i in items
        )
    return struct.pack(f"<{CODES[kind]}", value)


@dataclass
class GgufParts:
    """fields: key, type and value. tensors: name, dims, type, offset, bytes."""

    fields: list = field(default_factory=list)
    tensors: list = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_fields: int | None = None
    alignment: int = 32
    tail: bytes = b""

    def add(self, name, array):
        """A tensor of 32-bit floats behind the others."""
        offset = sum(-(-len(data) // self.alignment) * self.alignment for *_, data in self.tensors)
        data = numpy.ascontiguousarray(array, dtype="float32").tobytes()
        self.tensors.append([name, [*reversed(array.shape)], TENSOR_F32, offset, data])

    def copy(self):
        tensors = [[name, [*dims], *others] for name, dims, *others in self.tensors]
        return replace(self, fields=[[*field] for field in self.fields], tensors=tensors)

    def set(self, key, kind, value):
        """Put a field in the place of the one of this key, or behind the last."""
        for entry in self.fields:
            if entry[0] == key:
                entry[1:] = [kind, value]
                return
        self.fields.append([key, kind, value])

    def remove(self, key):
        self.fields = [entry for entry in self.fields if entry[0] != key]

    def header(self):
        count = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_fields = len(self.fields) if self.num_fields is None else self.num_fields
        text = [self.magic, struct.pack("<IQQ", self.version, count, num_fields)]
        for key, kind, value in self.fields:
            text += [string(key), struct.pack("<I", kind), value_bytes(kind, value)]
        for name, dims, kind, offset, _ in self.tensors:
            sizes = b"".join(struct.pack("<Q", size % 2**64) for size in dims)
            text += [string(name), struct.pack("<I", len(dims)), sizes]
            text += [struct.pack("<IQ", kind, offset % 2**64)]
        return b"".join(text)

    def to_bytes(self):
        header = self.header()
        data = b"".join(data + bytes(-len(data) % self.alignment) for *_, data in self.tensors)
        return header + bytes(-len(header) % self.alignment) + data + self.tail


TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""The modules of a layer of a Llama, and their names in a GGUF file."""


def permuted(weight, num_heads):
    """The rows of a projection as llama.cpp has them: the halves of each head by turns."""
    rows = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def llama_parts(model):
    """A Llama as llama.cpp would have it, with a vocabulary."""
    config, parts = model.config, GgufParts()
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    parts.fields.append(["general.architecture", STRING, "llama"])
    parts.fields.append(["general.name", STRING, "tiny"])
    parts.fields += [[f"llama.{name}", U32, size] for name, size in sizes.items()]
    parts.fields.append(["llama.attention.layer_norm_rms_epsilon", F32, config.rms_norm_eps])
    parts.fields.append(["llama.rope.freq_base", F32, 10000.0])
    parts.fields.append(["tokenizer.ggml.model", STRING, "llama"])
    tokens = [f"<{number}>" for number in range(config.vocab_size)]
    parts.fields.append(["tokenizer.ggml.tokens", ARRAY, (STRING, tokens)])
    parts.fields.append(["tokenizer.ggml.scores", ARRAY, (F32, [0.0] * config.vocab_size)])
    parts.fields.append(["tokenizer.ggml.eos_token_id", U32, 2])

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    parts.add("token_embd.weight", model.model.embed_tokens.weight.detach().numpy())
    for number, layer in enumerate(model.model.layers):
        for module, name in TENSORS.items():
            weight = layer.get_submodule(module).weight.detach().numpy()
            weight = permuted(weight, heads[name]) if name in heads else weight
            parts.add(f"blk.{number}.{name}.weight", weight)
    parts.add("output_norm.weight", model.model.norm.weight.detach().numpy())
    parts.add("output.weight", model.lm_head.weight.detach().numpy())
    return parts
