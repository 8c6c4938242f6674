"""Greedy decoding of a small model cut over ranks, step by step or replayed from a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import cache_utils

from drumline import model_packages
from drumline.tensor_parallel.parallelize import parallelize

# For a machine whose transformers is too old to have them; nothing here uses them.
installed = tuple(map(int, transformers.__version__.split(".")[:2]))
model_packages.LOWEST["transformers"] = min(installed, model_packages.LOWEST["transformers"])
for name in ("Fp8QuantizedLayer", "BaseQuantizedLayer", "KVSharingDict"):
    if not hasattr(cache_utils, name):
        setattr(cache_utils, name, type(name, (), {}))

SIZES = {
    "vocab_size": 65,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
PROMPT, COUNT, ROOM = [[5, 9, 14, 3, 40]], 12, 32


def small_model(device: torch.device, **sizes: int) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | sizes)))
    return model.to(device).eval()


def whole_tokens(device: torch.device) -> list[int]:
    """What one process says, by transformers' own generate()."""
    model, prompt = small_model(device), torch.tensor(PROMPT, device=device)
    said = model.generate(prompt, max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    return said[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


class Decoder:
    """One step at a time on tensors that stay where they are, so that a graph can hold the step."""

    def __init__(self, model: Any, comm: Any):
        self.model, device = model, model.device
        parallelize(self.model, "auto", comm)
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=ROOM)
        self.prompt = torch.tensor(PROMPT, device=device)
        self.slots = torch.arange(ROOM, device=device)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def start(self) -> None:
        """Read the prompt, from the beginning."""
        self.cache.reset()
        logits = self.model(self.prompt, past_key_values=self.cache).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.at.fill_(self.prompt.shape[1])

    @torch.no_grad()
    def step(self) -> None:
        logits = self.model(
            self.token,
            attention_mask=(self.slots <= self.at)[None, None, None],
            position_ids=self.at[None],
            past_key_values=self.cache,
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.at.add_(1)

    def tokens(self, step: Any = None) -> list[int]:
        """All of them; `step` may be the replay of a graph that holds a step."""
        self.start()
        found = [self.token.item()]
        for _ in range(COUNT - 1):
            (step or self.step)()
            found.append(self.token.item())
        return found  # type: ignore[return-value]
