"""What test_portable.py runs on two ranks: a vocabulary-parallel model traced once for both."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from coordinator import Coordinator
from drumline import HoistError, check_no_process_groups, trace_portable

WORDS, WIDTH, OUT = 10, 4, 6
IDS = torch.tensor([1, 7, 3])


def step(mesh, embed, head, ids):
    def whole(tensor, placement, shape):
        return DTensor.from_local(
            tensor,
            mesh,
            [placement],
            run_check=False,
            shape=shape,
            stride=(shape[-1], 1)[-len(shape) :],
        )

    found = F.embedding(
        whole(ids, Replicate(), (3,)), whole(embed, Shard(0), (WORDS, WIDTH))
    ).redistribute(placements=[Replicate()])
    out = F.linear(found, whole(head, Shard(0), (OUT, WIDTH)))
    return out.redistribute(placements=[Replicate()]).to_local()


def traced(mode):
    def build():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        shards = torch.zeros(WORDS // 2, WIDTH), torch.zeros(OUT // 2, WIDTH)
        return make_fx(lambda *args: step(mesh, *args), tracing_mode=mode)(*shards, IDS)

    return build


def refused(work):
    try:
        work()
    except HoistError as error:
        return str(error)
    raise AssertionError("a program that is wrong on other ranks was let out")


def without_the_mesh():
    """As one would trace on rank 0 if one did not know."""
    from drumline.compile_once.portable import _fake_process_group

    with _fake_process_group(0, 2):
        program = traced("fake")()
    graph = fx.Graph()
    graph.output(graph.call_module("branch", (1,)))
    outer = fx.GraphModule({"branch": program}, graph)
    assert "process group" in refused(lambda: check_no_process_groups(outer))
    check_no_process_groups(program)


def asking_for_its_rank():
    return make_fx(lambda x: x + dist.get_rank())(torch.ones(3))


def with_its_rank_in_a_constant():
    own = torch.full((3,), float(dist.get_rank()))
    return make_fx(lambda x: x + own)(torch.ones(3))


def with_its_rank_in_a_branch():
    wave = torch.sin if dist.get_rank() else torch.cos

    def either(x):
        return torch.cond(x.sum() > 0, lambda x: wave(x), lambda x: x - 1, (x,))

    return make_fx(either, tracing_mode="symbolic")(torch.ones(3))


if __name__ == "__main__":
    print("refused:", refused(without_the_mesh))
    for build in (asking_for_its_rank, with_its_rank_in_a_constant, with_its_rank_in_a_branch):
        print("refused:", refused(lambda build=build: trace_portable(build, 2)))
    program = trace_portable(traced("symbolic"), 2)
    torch.manual_seed(0)
    embed, head = torch.randn(WORDS, WIDTH), torch.randn(OUT, WIDTH)
    with Coordinator() as coor:
        store = coor.store("torch")
        dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = embed.chunk(2)[coor.rank], head.chunk(2)[coor.rank]
        with torch.no_grad():
            error = (
                (program(*mine, IDS, mesh) - F.linear(F.embedding(IDS, embed), head)).abs().max()
            )
        assert error < 1e-6, error
        print(f"rank {coor.rank} within {error:.1e} of a single process")
        refused(lambda: trace_portable(traced("symbolic"), 2))
        dist.destroy_process_group()
