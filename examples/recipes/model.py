"""The model that the recipes share: residual blocks between an embedding and a head."""

import torch
from torch import nn

WORDS, WIDTH, INNER, DEPTH = 96, 32, 64, 4

PLAN = {  # how tensor parallelism cuts it
    "embed": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """[batch, length] of words in, [batch, length, WORDS] of logits out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(device="cpu"):
    """The same weights on every rank, from a generator of their own: ranks may be threads."""
    model, generator = Model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model.to(device)


def make_batch(size, device="cpu", length=16):
    """The same words on every rank: inputs and the word that follows each."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (size, length + 1), generator=generator)
    return words[:, :-1].to(device), words[:, 1:].to(device)


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def device_of(coor):
    """The GPU of this rank, if there is one for each; called on all ranks."""
    has_gpus = coor.all_true(coor.local_rank < torch.cuda.device_count())
    return f"cuda:{coor.local_rank}" if has_gpus else "cpu"


def largest_error(found, expected):
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
