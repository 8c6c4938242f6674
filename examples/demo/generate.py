"""Generate text with one model over ranks that each have room for only a part of it.

drumline run -n 2 examples/demo/generate.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import drumline
import launcher

PROMPT = "The try statement "
NEW_TOKENS = 160
SPARE = 1.25  # the memory of a rank, as a multiple of its even share


def memory_for_a_part(folder: Path, ranks: int) -> list[int]:
    """Bytes for each rank, so that no rank can hold the whole model."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return [int(index["metadata"]["total_size"] / ranks * SPARE)] * ranks


def generate(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """The prompt and its continuation: [1, length + NEW_TOKENS]. Sampled, equal at every call."""
    torch.manual_seed(0)
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.5)


torch.set_num_threads(1)
logging.disable_progress_bar()
folder = Path(sys.argv[1])
memory = memory_for_a_part(folder, launcher.current().world_size)

with drumline.load(folder, device_map="auto", max_memory=memory) as model:
    # From here on this is the script of rank 0: the other ranks serve inside load().
    print(model.device_map)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    start = time.monotonic()
    tokens = generate(model, prompt)
    rate = NEW_TOKENS / (time.monotonic() - start)
    print(f"\n{tokenizer.decode(tokens[0])}\n")

alone = generate(AutoModelForCausalLM.from_pretrained(folder), prompt)
equal = torch.equal(tokens, alone)
print(f"{rate:.0f} tokens/s over {len(memory)} ranks of {memory[0] / 2**20:.1f} MiB each")
print("tokens equal those of a single process" if equal else "TOKENS DIFFER from a single process")
sys.exit(0 if equal else 1)
