"""A traced launch shows every stage of a pipeline, and what it waits for."""

import json

import torch

import drumline
import launcher

RANKS = 3


def test_every_stage_is_traced_with_its_waits(checkpoints, tmp_path):
    _, folder = checkpoints.llama()

    def rank():
        with drumline.load(folder, max_memory=[1 << 30] * RANKS) as model:
            model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3)

    out = tmp_path / "out.json"
    launcher.launch(rank, nprocs=RANKS, launcher="threads", trace=out, timeout_s=60)
    events = json.loads(out.read_text())["traceEvents"]
    seen = {(one["pid"], one["name"], one.get("cat")) for one in events}
    assert {(rank, "stage", "work") for rank in range(RANKS)} <= seen
    assert {(rank, "wait for the stage before", "wait") for rank in (1, 2)} <= seen
    assert (0, "wait for the other stages", "wait") in seen
    given = [one["args"] for one in events if one["name"] == "stage" and one["pid"] == 2]
    assert given[0]["stage"] == 2 and given[0]["number"] == 1
