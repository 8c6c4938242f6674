"""Train a small character-level Llama on all ranks; save it with its tokenizer as a checkpoint.

drumline run -n 2 examples/demo/train.py FOLDER [STEPS]
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from text import character_tokenizer, corpus
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from communicator import Communicator
from coordinator import Coordinator

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 200
TOKENIZER = character_tokenizer()
BATCH, LENGTH, LEARNING_RATE = 16, 128, 3e-3
REPORTS, BAR = 15, 30  # lines of progress, characters of the bar


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def batch(tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """count pieces of the text from random places: [count, LENGTH]."""
    starts = torch.randint(len(tokens) - LENGTH, (count,), generator=generator)
    return torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])


def average_gradients(model: LlamaForCausalLM, comm: Communicator) -> None:
    """Replace every gradient by its average over the ranks, all in one allreduce."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    comm.allreduce(flat, "avg")
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def report(step: int, loss: float, start: float) -> None:
    """One line: the ranks' output goes line by line, so the bar grows downwards."""
    line = Table.grid(padding=(0, 1))
    text = f"step {step:3}/{STEPS}  loss {loss:.3f}  {time.monotonic() - start:.0f} s"
    line.add_row(ProgressBar(total=STEPS, completed=step, width=BAR), text)
    Console(width=100).print(line)


def train(coor: Coordinator, comm: Communicator) -> LlamaForCausalLM:
    """The same model on every rank, each having seen its share of every batch."""
    torch.set_num_threads(max(torch.get_num_threads() // coor.local_world_size, 1))
    model, tokens = new_model(), corpus(TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    generator = torch.Generator().manual_seed(coor.rank)
    start = time.monotonic()
    for step in range(1, STEPS + 1):
        inputs = batch(tokens, max(BATCH // coor.world_size, 1), generator)
        loss = model(input_ids=inputs, labels=inputs).loss
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, comm)
        optimizer.step()
        schedule.step()
        if coor.is_master() and (step == 1 or step % max(STEPS // REPORTS, 1) == 0):
            report(step, loss.item(), start)
    return model


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write shards and index beside folder, and put them there whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        model.save_pretrained(Path(beside) / "new", max_shard_size="1MB")
        TOKENIZER.save_pretrained(Path(beside) / "new")
        try:
            (Path(beside) / "new").rename(folder)
        except OSError:
            print(f"{folder} was made by somebody else in the meantime; kept that one")
            return
    print(f"saved {sum(p.numel() for p in model.parameters()):,} parameters in {folder}")


logging.disable_progress_bar()  # ours is drawn in report()
with Coordinator() as coor, Communicator(coor, device_type="cpu") as comm:
    if coor.is_master():
        print(f"training on {coor.world_size} ranks, gradients over {comm.backend}")
    trained = train(coor, comm)
    if coor.is_master():
        save(trained, Path(sys.argv[1]))
