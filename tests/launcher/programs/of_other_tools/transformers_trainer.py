"""A script for torchrun or `accelerate launch`: transformers' Trainer on a tiny model."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)  # fmt: skip
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], per_device_train_batch_size=2, max_steps=2, report_to=[],
    save_strategy="no", disable_tqdm=True,
)  # fmt: skip
assert arguments.world_size > 1, arguments.parallel_mode
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
trainer.train()
assert trainer.state.global_step == 2
print(f"trained as {arguments.process_index} of {arguments.world_size}")
