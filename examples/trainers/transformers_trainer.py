"""transformers' Trainer on drumline: make the process group before TrainingArguments.

torchrun --nproc-per-node 2 examples/trainers/transformers_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import communicator.torch_backend  # noqa: F401  only needed where drumline is not installed

dist.init_process_group("drumline")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
words = torch.arange(16) % 7
rows = [{"input_ids": words, "labels": words} for _ in range(64)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=20,
        learning_rate=0.01,
        logging_steps=10,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
    trainer.train()
first, last = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
assert arguments.world_size == dist.get_world_size()
assert last < first, (first, last)
if arguments.process_index == 0:
    print(f"{arguments.world_size} ranks: the loss fell from {first:.2f} to {last:.2f}")
dist.destroy_process_group()
