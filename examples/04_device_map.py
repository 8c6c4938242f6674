"""One model over every rank, each with room for only a part of it; rank 0 generates.

drumline run -n 2 examples/04_device_map.py [CHECKPOINT]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import drumline
from coordinator import Coordinator


def random_llama(folder: str) -> str:
    """folder, with a small Llama of random weights saved in it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


torch.set_num_threads(1)
logging.disable_progress_bar()
coor = Coordinator()
scratch = tempfile.TemporaryDirectory()
if coor.is_master():
    given = sys.argv[1] if len(sys.argv) > 1 else random_llama(scratch.name)
folder = coor.broadcast(given.encode() if coor.is_master() else None).decode()
whole = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
max_memory = [int(whole / coor.world_size * 1.5)] * coor.world_size

# The other ranks serve inside load() until this block ends; what follows is the master's alone.
with drumline.load(folder, device_map="auto", coor=coor, max_memory=max_memory) as model:
    print(model.device_map)
    prompt = torch.arange(10, 20)[None]
    tokens = model.generate(prompt, max_new_tokens=20, do_sample=False)

alone = AutoModelForCausalLM.from_pretrained(folder).generate(
    prompt, max_new_tokens=20, do_sample=False
)
assert torch.equal(tokens, alone), "not the tokens of a single process"
print(f"{tokens[0, 10:].tolist()}\nequal to the tokens of a single process")
