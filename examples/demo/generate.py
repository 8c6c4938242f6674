"""Generate text with one model over ranks that each have room for only a part of it.

python -m launcher run -n 2 examples/demo/generate.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
from text import decode, encode
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import drumline
import launcher

PROMPT = "The try statement "
NEW_TOKENS = 160
SPARE = 1.25  # a rank may hold this much more than its even share


def room_for_a_part(folder: Path, ranks: int) -> list[int]:
    """Bytes for each rank, so that no rank has room for the whole."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return [int(index["metadata"]["total_size"] / ranks * SPARE)] * ranks


def generate(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """prompt and what follows it: [1, length + NEW_TOKENS]. Sampled, the same at every call."""
    torch.manual_seed(0)
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.5)


torch.set_num_threads(1)
logging.disable_progress_bar()
folder = Path(sys.argv[1])
room = room_for_a_part(folder, launcher.current().world_size)

with drumline.load(folder, device_map="auto", max_memory=room) as model:
    # From here on this is the master's script: the other ranks serve inside load().
    print(model.device_map)
    prompt = encode(PROMPT)[None]
    start = time.monotonic()
    tokens = generate(model, prompt)
    rate = NEW_TOKENS / (time.monotonic() - start)
    print(f"\n{decode(tokens[0])}\n")

alone = generate(AutoModelForCausalLM.from_pretrained(folder), prompt)
equal = torch.equal(tokens, alone)
print(f"{rate:.0f} tokens/s over {len(room)} ranks of {room[0] / 2**20:.1f} MiB each")
print("tokens equal those of a single process" if equal else "TOKENS DIFFER from a single process")
sys.exit(0 if equal else 1)
