"""A Llama cut over the ranks: every layer reads its own slice of each weight from the checkpoint.

Heads, the inner rows of the MLP and the words of the vocabulary are shared out. So a layer sums the
ranks' parts twice, after the attention and after the MLP, and the logits are joined at the end.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from communicator import Communicator

PAGE = 16  # tokens of one sequence, whose keys and values lie together in the cache


@dataclass(frozen=True)
class LlamaShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float
    is_tied: bool

    @classmethod
    def read(cls, folder: Path, world_size: int) -> "LlamaShape":
        """From config.json. Raises ValueError for a model that this file does not compute."""
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", "default")
        biases = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
        if config["model_type"] != "llama" or kind != "default" or biases:
            raise ValueError(f"{folder} is a {config['model_type']} with rope {kind} and {biases}")
        heads = config["num_attention_heads"]
        shape = cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
            is_tied=config.get("tie_word_embeddings", False),
        )
        for name, size in (("heads", shape.kv_heads), ("words", shape.vocab)):
            if size % world_size:
                raise ValueError(f"{size} {name} cannot be shared out evenly to {world_size} ranks")
        return shape


class Checkpoint:
    """The safetensors files of a folder, of which a rank reads its slices and nothing more."""

    def __init__(self, folder: Path, comm: Communicator, dtype: torch.dtype) -> None:
        self.comm, self.dtype = comm, dtype
        files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def whole(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name).to(self.comm.device, self.dtype)

    def rows(self, name: str) -> torch.Tensor:
        part = self.files[name].get_slice(name)
        return part[self._share(part, 0)].to(self.comm.device, self.dtype)

    def columns(self, name: str) -> torch.Tensor:
        part = self.files[name].get_slice(name)
        return part[:, self._share(part, 1)].to(self.comm.device, self.dtype)

    def _share(self, part: object, dim: int) -> slice:
        size = part.get_shape()[dim] // self.comm.world_size
        return slice(self.comm.rank * size, (self.comm.rank + 1) * size)


@dataclass
class Batch:
    """Sequences of as many new tokens each. positions: [sequences, tokens]; tables: [sequences,
    pages], the pages of the cache that hold each sequence, in order."""

    positions: torch.Tensor
    tables: torch.Tensor
    angles: torch.Tensor

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x, [sequences, heads, tokens, head_dim], turned by its positions."""
        one, other = x.chunk(2, -1)
        cos, sin = self.angles.cos().to(x.dtype), self.angles.sin().to(x.dtype)
        return x * cos + torch.cat((-other, one), -1) * sin


class Attention:
    """Some heads of the attention, and the keys and values of all sequences for them."""

    def __init__(self, weights: Checkpoint, prefix: str, shape: LlamaShape, pages: int):
        self.comm, self.head_dim = weights.comm, shape.head_dim
        self.q, self.k, self.v = (weights.rows(f"{prefix}{x}_proj.weight") for x in "qkv")
        self.o = weights.columns(f"{prefix}o_proj.weight")
        heads = shape.kv_heads // self.comm.world_size
        self.cache = self.q.new_zeros(2, heads, pages, PAGE, shape.head_dim)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        q, k, v = (self._heads(F.linear(x, weight)) for weight in (self.q, self.k, self.v))
        keys, values = self._extended(batch, torch.stack((batch.rotated(k), v)))
        mask = torch.arange(keys.shape[2], device=x.device) <= batch.positions[:, None, :, None]
        heads = F.scaled_dot_product_attention(
            batch.rotated(q), keys, values, attn_mask=mask, enable_gqa=True
        )
        part = F.linear(heads.transpose(1, 2).flatten(2), self.o)
        return self.comm.allreduce(part)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _extended(self, batch: Batch, new: torch.Tensor) -> torch.Tensor:
        """The cached keys and values of the batch's sequences, the new ones written to it."""
        pages = batch.tables.gather(1, batch.positions // PAGE)
        self.cache[:, :, pages, batch.positions % PAGE] = new.transpose(1, 2)
        return self.cache[:, :, batch.tables].flatten(3, 4).transpose(1, 2)


class Mlp:
    """Some inner rows of the MLP."""

    def __init__(self, weights: Checkpoint, prefix: str) -> None:
        self.comm = weights.comm
        self.gate, self.up = (weights.rows(f"{prefix}{x}_proj.weight") for x in ("gate", "up"))
        self.down = weights.columns(f"{prefix}down_proj.weight")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)
        return self.comm.allreduce(part)


class Vocabulary:
    """Some words of the vocabulary: their embeddings, and their logits."""

    def __init__(self, weights: Checkpoint, is_tied: bool) -> None:
        self.comm = weights.comm
        self.embeddings = weights.rows("model.embed_tokens.weight")
        self.head = self.embeddings if is_tied else weights.rows("lm_head.weight")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens - self.comm.rank * len(self.embeddings)
        is_own = (own >= 0) & (own < len(self.embeddings))
        rows = self.embeddings[own.where(is_own, 0)]
        return self.comm.allreduce(rows * is_own[..., None])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Those of the whole vocabulary, the same bits on every rank."""
        return self.comm.allgather(F.linear(x, self.head), dim=-1)


class Llama:
    """pages: of the cache, each of the keys and values of PAGE tokens of one sequence."""

    def __init__(self, folder: Path, comm: Communicator, dtype: torch.dtype, pages: int):
        self.shape = LlamaShape.read(folder, comm.world_size)
        weights = Checkpoint(folder, comm, dtype)
        self.vocabulary = Vocabulary(weights, self.shape.is_tied)
        self.norm = weights.whole("model.norm.weight")
        self.layers = []
        for number in range(self.shape.layers):
            prefix = f"model.layers.{number}."
            attention = Attention(weights, f"{prefix}self_attn.", self.shape, pages)
            norms = ("input_layernorm", "post_attention_layernorm")
            scales = [weights.whole(f"{prefix}{norm}.weight") for norm in norms]
            self.layers.append((scales, attention, Mlp(weights, f"{prefix}mlp.")))

    def _normed(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return scale * (wide * (wide.square().mean(-1, True) + self.shape.eps).rsqrt()).to(x.dtype)

    def _batch(self, positions: torch.Tensor, tables: torch.Tensor, whole: bool) -> Batch:
        steps = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float()
        frequencies = self.shape.theta ** (-steps / self.shape.head_dim)
        angles = positions[:, None, :, None].float() * torch.cat((frequencies, frequencies))
        count = tables.shape[1] if whole else int(positions.max()) // PAGE + 1
        return Batch(positions, tables[:, :count], angles)

    @torch.no_grad()
    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, whole: bool
    ) -> torch.Tensor:
        """The hidden state after the last token of each sequence.

        whole: read all pages of the tables, masked, so that no shape depends on the positions.
        """
        batch = self._batch(positions, tables, whole)
        x = self.vocabulary.embed(tokens)
        for (before, after), attention, mlp in self.layers:
            x = x + attention(self._normed(x, before), batch)
            x = x + mlp(self._normed(x, after))
        return self._normed(x[:, -1], self.norm)
