"""Campaigns of files that lie, of every format that is read: see hostile_files.py."""

import random
from importlib.util import find_spec

import pytest

from tests.drumline.checkpoint.hostile_files import Campaign


@pytest.mark.parametrize("count", [30, pytest.param(600, marks=pytest.mark.soak)])
def test_files_that_lie_are_refused_or_loaded_as_another_reader_reads_them(tmp_path, count):
    seed = 1 if count < 100 else random.randrange(1 << 32)
    campaign = Campaign(tmp_path, seed)
    readers = {"gguf": "gguf", "lora": "peft"}  # by kind, what it needs
    kinds = [kind for kind in campaign.kinds if find_spec(readers.get(kind, "torch"))]
    assert [*campaign.run(range(count), kinds)] == []
    assert 0 < campaign.num_loaded < count
