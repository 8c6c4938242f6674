"""What the ranks of the GPU tests do: python -m tests.gpu.ranks CASE, as started by one_gpu.py.

Cases of other modules here are MODULE.CASE.
"""

import collections
import ctypes
import gc
import importlib
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from communicator import Communicator, CommunicatorTimeout, PeerLost, conformance
from communicator.backends.nccl import Nccl, oneshot
from communicator.backends.nccl.cupy import Cupy
from coordinator import Coordinator, DrumlineError
from tests.gpu.one_gpu import GPU, RESULT, ROOT

MIB = 1 << 20
GRAPHS, CALLS_PER_GRAPH = 30, 65
SOON_S = 20.0
AFTERMATH_S = 2.0  # NCCL's own abort ends once the graph has, aside, and better before the process
NODE_KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record")  # cuda.h


def conform(coor: Coordinator, backend: str = "nccl", *options: str) -> dict[str, int]:
    made = {"nccl": Nccl, "cupy": Cupy}[backend]
    side = torch.cuda.Stream() if coor.world_size == 2 else None  # one that is not the default
    chosen = {option: True for option in options}
    with torch.cuda.stream(side), Communicator._of(made, coor, device=0, **chosen) as comm:
        report = conformance.check(comm)
        report.raise_if_failed()
        return {s: len(report.having(s)) for s in (conformance.PASSED, conformance.UNSUPPORTED)}


def the_known_cases(coor: Coordinator) -> list[float]:
    """Ones add up to the world; a scaled sum scales; split and registered memory work."""
    with Communicator._of(Nccl, coor, device=0) as comm:
        ones = comm.allreduce(torch.ones(16, 1024, 1024, device=GPU)).mean().item()
        half = comm.scaled_sum(0.5, torch.float32)
        scaled = comm.allreduce(torch.full((7,), 4.0, device=GPU), half).mean().item()
        registered = comm.empty((3, 5), torch.bfloat16).fill_(1)
        comm.allreduce(registered)
        alone = comm.split([comm.world_size - 1])
        last = -1.0
        if alone is not None:
            last = alone.allreduce(torch.full((3,), 7.0, device=GPU)).mean().item()
            alone.close()
        return [ones, scaled, registered.float().mean().item(), last]


def capture_and_replay(coor: Coordinator, mode: str = "waiting") -> list[float]:
    """A captured call does nothing until it is replayed; eager and captured calls mix."""
    with Communicator._of(Nccl, coor, device=0, blocking=mode == "blocking") as comm:
        tensor, found = torch.ones(1000, device=GPU), []
        comm.allreduce(tensor.clone())
        cuda_graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        for graph in cuda_graphs:
            with torch.cuda.graph(graph):
                comm.allreduce(tensor)
        found.append(tensor.mean().item())
        for graph in cuda_graphs:
            graph.replay()
            comm.allreduce(tensor)
        comm.synchronize()
        found.append(tensor.mean().item())
        tensor.fill_(1)
        cuda_graphs[0].replay()
        comm.synchronize()
        found.append(tensor.mean().item())
        for graph in cuda_graphs:
            graph.reset()
        return found


def first_use_in_a_capture(coor: Coordinator) -> str:
    with Communicator._of(Nccl, coor, device=0) as comm:
        tensor, graph = torch.ones(100_000, device=GPU), torch.cuda.CUDAGraph()
        said = ""
        with torch.cuda.graph(graph):
            try:
                comm.allreduce(tensor)
            except DrumlineError as error:
                said = str(error)
            tensor.add_(0)
        graph.reset()
        comm.allreduce(tensor)
        comm.synchronize()
        return said


def graph_memory(coor: Coordinator) -> float:
    """MiB that a graph of many calls costs the device, for each rank."""
    with Communicator._of(Nccl, coor, device=0) as comm:
        scale = comm.scaled_sum(1.0, torch.bfloat16)  # so that one rank launches kernels too
        tensor = torch.ones(8192, dtype=torch.bfloat16, device=GPU)
        comm.allreduce(tensor, scale)
        cuda_graphs, pool = [_graph(comm, tensor, scale, None)], None
        pool = cuda_graphs[0].pool()
        before = free_nbytes(coor)
        cuda_graphs += [_graph(comm, tensor, scale, pool) for _ in range(GRAPHS)]
        used = before - free_nbytes(coor)
        cuda_graphs[-1].replay()
        comm.synchronize()
        for graph in cuda_graphs:
            graph.reset()
        return used / MIB / GRAPHS / comm.world_size


def _graph(comm, tensor, op, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(CALLS_PER_GRAPH):
            comm.allreduce(tensor, op)
    return graph


def captured_nodes(coor: Coordinator, calls: str = "65") -> dict[str, int]:
    """How many nodes of each kind a graph of so many allreduces has."""
    with Communicator._of(Nccl, coor, device=0) as comm:
        scale = comm.scaled_sum(1.0, torch.bfloat16)  # so that one rank launches kernels too
        tensor = torch.ones(8192, dtype=torch.bfloat16, device=GPU)
        comm.allreduce(tensor, scale)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for _ in range(int(calls)):
                comm.allreduce(tensor, scale)
        found = _nodes(graph.raw_cuda_graph())
        graph.reset()
        return found


def _nodes(graph: int) -> dict[str, int]:
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    if not count.value:
        return {}
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(NODE_KINDS[kind.value] if kind.value < len(NODE_KINDS) else str(kind.value))
    return collections.Counter(kinds)


def free_nbytes(coor: Coordinator) -> int:
    torch.cuda.synchronize()
    coor.barrier()
    free = torch.cuda.mem_get_info(0)[0]
    coor.barrier()
    return free


def close_with_a_live_graph(coor: Coordinator) -> str:
    comm = Communicator._of(Nccl, coor, device=0)
    double = comm.scaled_sum(2.0, torch.float32)
    tensor = torch.ones(5, device=GPU)
    comm.allreduce(tensor, double)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.allreduce(tensor, double)
    said = ""
    try:
        comm.close()
    except DrumlineError as error:
        said = str(error)
    graph.replay()
    comm.synchronize()
    assert tensor.tolist() == [4.0 * comm.world_size**2] * 5, tensor
    del graph
    gc.collect()
    comm.close()
    return said


def abort_with_a_live_graph(coor: Coordinator) -> float:
    comm = Communicator._of(Nccl, coor, device=0)
    double = comm.scaled_sum(2.0, torch.float32)
    tensor = torch.ones(5, device=GPU)
    comm.allreduce(tensor, double)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.allreduce(tensor, double)
    start = time.monotonic()
    comm.abort()
    took_s = time.monotonic() - start
    try:
        comm.allreduce(tensor)
        raise AssertionError("a call after abort() went through")
    except PeerLost:
        pass
    comm.close()
    assert torch.ones(3, device=GPU).sum().item() == 3.0
    graph.reset()
    time.sleep(AFTERMATH_S)
    return took_s


def failed_capture(coor: Coordinator) -> list[Any]:
    """A capture that CUDA refuses, for a value is read in it; eager calls go on after it."""
    with Communicator._of(Nccl, coor, device=0) as comm:
        tensor, said = torch.ones(1000, device=GPU), ""
        comm.allreduce(tensor)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                comm.allreduce(tensor)
                tensor.mean().item()
        except RuntimeError as error:
            said = str(error)
        tensor.fill_(1)
        comm.allreduce(tensor)
        comm.synchronize()
        return [said, tensor.mean().item()]


def killed_peer(coor: Coordinator, mode: str = "waiting") -> list[str | float]:
    """The last rank dies; the others wait for it on the GPU, and must learn its name."""
    comm = Communicator._of(Nccl, coor, device=0, checked_calls=1, blocking=mode == "blocking")
    comm.allreduce(torch.ones(10, device=GPU))
    comm.synchronize()
    coor.barrier()
    if coor.rank == coor.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    said = ""
    try:
        comm.allreduce(torch.ones(10, device=GPU))
        comm.synchronize(SOON_S)
        comm.allreduce(torch.ones(10, device=GPU))
    except (PeerLost, CommunicatorTimeout) as error:
        said = str(error)
    took_s = time.monotonic() - start
    torch.cuda.synchronize()
    _leave([said, took_s])
    return []


def killed_in_replay(coor: Coordinator, kind: str = "nccl") -> list[str | float]:
    """The last rank dies while the others replay; check() names it, and the GPU is free again."""
    comm = Communicator._of(Nccl, coor, device=0, checked_calls=0, oneshot=kind == "oneshot")
    tensor, graph = torch.ones(1024, device=GPU), torch.cuda.CUDAGraph()
    comm.allreduce(tensor)
    with torch.cuda.graph(graph):
        comm.allreduce(tensor)
    graph.replay()
    comm.synchronize()
    coor.barrier()
    if coor.rank == coor.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start, said = time.monotonic(), ""
    while not said and time.monotonic() < start + SOON_S:
        graph.replay()
        time.sleep(0.05)
        said = _told(comm.check)
        said = "" if said == "nothing" else said
    took_s = time.monotonic() - start
    torch.cuda.synchronize()
    _leave([said, took_s, torch.ones(3, device=GPU).sum().item()])
    return []


def oneshot_on_two_streams(coor: Coordinator) -> list[float]:
    """Sums on one stream after the other, without a wait of the host in between."""
    with Communicator._of(Nccl, coor, device=0, oneshot=True) as comm:
        made = [torch.cuda.Stream() for _ in range(2)]
        tensors = [torch.ones(1024, device=GPU) for _ in range(20)]
        torch.cuda.synchronize()
        for turn, tensor in enumerate(tensors):
            with torch.cuda.stream(made[turn % 2]):
                torch.cuda._sleep(100_000)
                comm.allreduce(tensor)
        torch.cuda.synchronize()
        comm.check()
        return [tensor.mean().item() for tensor in tensors]


def _leave(result) -> None:
    """End without closing the Coordinator, which would wait for the dead."""
    _give(result)
    os._exit(0)


def absent_rank(coor: Coordinator, mode: str = "waiting") -> list[str | float]:
    """The last rank does not make the call: the others' wait has an end, and so does abort()."""
    comm = Communicator._of(Nccl, coor, device=0, checked_calls=0, blocking=mode == "blocking")
    comm.allreduce(torch.ones(10, device=GPU))
    comm.synchronize()
    start, said = time.monotonic(), ""
    if coor.rank != coor.world_size - 1:
        comm.allreduce(torch.ones(10, device=GPU))
        try:
            comm.synchronize(2.0)
        except CommunicatorTimeout as error:
            said = str(error)
        comm.abort()
        torch.cuda.synchronize()
    took_s = time.monotonic() - start
    coor.barrier()
    comm.abort()
    comm.close()
    return [said, took_s]


def shrunk(coor: Coordinator, mode: str, fault: str) -> list[Any]:
    """The last rank stays away or dies while the others wait for it on the GPU; those go on
    without it."""
    options = {"device": 0, "checked_calls": 0, "blocking": mode == "blocking"}
    comm = Communicator._of(Nccl, coor, revoke=True, **options)
    comm.allreduce(torch.ones(10, device=GPU))
    comm.synchronize()
    coor.barrier()
    last = coor.world_size - 1
    if coor.rank == last and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    start, said = time.monotonic(), ""
    if coor.rank != last:
        comm.allreduce(torch.ones(10, device=GPU))
        said = _told(lambda: comm.synchronize(2.0 if fault == "absent" else SOON_S))
        comm.abort()
    lost_s = time.monotonic() - start
    part = Coordinator(coor.survivors()) if fault == "killed" else coor.split([*range(last)])
    if part is None:
        _leave([])
    start = time.monotonic()
    new = Communicator._of(Nccl, part, shrink_of=comm, **options)
    shrunk_s = time.monotonic() - start
    tensor = new.allreduce(torch.ones(1024, device=GPU))
    new.synchronize(SOON_S)
    new.close()
    closed = _told(comm.close)
    torch.cuda.synchronize()
    _leave([said, lost_s, shrunk_s, new.world_size, tensor.mean().item(), closed])
    return []


def absent_rank_and_ras(coor: Coordinator, port: str) -> str:
    """The last rank does not make the call, and the error of the others has what RAS says."""
    address = f"127.0.0.1:{port}"
    os.environ |= {"NCCL_RAS_ENABLE": "1", "NCCL_RAS_ADDR": address}
    comm = Communicator._of(Nccl, coor, device=0, checked_calls=0, ras=address)
    comm.allreduce(torch.ones(10, device=GPU))
    comm.synchronize()
    said = ""
    if coor.rank != coor.world_size - 1:
        comm.allreduce(torch.ones(10, device=GPU))
        said = _told(lambda: comm.synchronize(2.0))
        comm.abort()
        torch.cuda.synchronize()
    coor.barrier()
    comm.abort()
    comm.close()
    return said


def oneshot_sums(coor: Coordinator) -> list[str]:
    """The one-shot kernel of each process, on arenas that the processes map by CUDA IPC."""
    with Communicator._of(Nccl, coor, device=0, oneshot=True) as comm:
        problems = [
            f"{way.name} of {nbytes} bytes of {dtype}"
            for dtype in oneshot.DTYPES
            for nbytes in (16, 4096, 262_144, 524_288)
            for way in oneshot.Algorithm
            if not _is_exact(comm, nbytes, dtype, way)
        ]
        tensor = torch.ones(1000, device=GPU)
        comm.allreduce(tensor[4:])
        comm.allreduce(tensor[1:-3])  # not aligned: summed in a copy
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.allreduce(tensor[4:])
        graph.replay()
        comm.synchronize()
        world = float(comm.world_size)
        if tensor[0] != 1 or tensor[1] != world or (tensor[4:-3] != world**3).any():
            problems.append(f"in place, beside others, or replayed: {tensor}")
        graph.reset()
    return problems + _on_its_own_stream(coor)


def _on_its_own_stream(coor: Coordinator) -> list[str]:
    """Small sums go on the stream that was given, after what the current one has to do."""
    side, tensor = torch.cuda.Stream(), torch.zeros(1024, device=GPU)
    with Communicator._of(Nccl, coor, device=0, oneshot=True, stream=side) as comm:
        torch.cuda._sleep(100_000_000)
        comm.allreduce(tensor.fill_(1))
        torch.cuda._sleep(100_000_000)
        with torch.cuda.stream(side):
            found = tensor.mean().item()
        return [] if found == comm.world_size else [f"a sum on a stream of its own gave {found}"]


def _is_exact(comm, nbytes, dtype, way) -> bool:
    generator = torch.Generator(GPU).manual_seed(comm.rank)
    mine = torch.randn(nbytes // dtype.itemsize, generator=generator, device=GPU).to(dtype)
    every, found = comm.allgather(mine), torch.empty_like(mine)
    comm._backend.oneshot.sum(mine, found, way)
    total = every[0].float()
    for part in every[1:]:
        total += part.float()
    comm.synchronize()
    return torch.equal(found.view(torch.uint8), total.to(dtype).view(torch.uint8))


def oneshot_absent_rank(coor: Coordinator) -> list[str | float]:
    """The last rank does not make the call: the kernels of the others give up, and say so."""
    # A comparison of the first calls would wait for the absent rank before any kernel runs.
    with Communicator._of(Nccl, coor, device=0, oneshot=True, checked_calls=0) as comm:
        comm._backend.oneshot._call.timeout_ns = int(2e9)
        start, said = time.monotonic(), ""
        if coor.rank != coor.world_size - 1:
            comm.allreduce(torch.ones(1024, device=GPU))
            try:
                comm.synchronize()
            except (CommunicatorTimeout, PeerLost) as error:  # here, or by the watchdog
                said = str(error)
        took_s = time.monotonic() - start
        coor.barrier()
        comm.abort()  # on all, for the other has lost nothing
        return [said, took_s, torch.ones(3, device=GPU).sum().item()]


def oneshot_replay_alone(coor: Coordinator) -> str:
    """The last rank replays nothing: the others learn it from check(), without another call."""
    with Communicator._of(Nccl, coor, device=0, oneshot=True, checked_calls=0) as comm:
        comm._backend.oneshot._call.timeout_ns = int(2e9)
        tensor, said = torch.ones(1024, device=GPU), ""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.allreduce(tensor)
        coor.barrier()
        deadline = time.monotonic() + SOON_S
        if coor.rank != coor.world_size - 1:
            graph.replay()
            while not said and time.monotonic() < deadline:
                time.sleep(0.1)
                said = _told(comm.check)
                said = "" if said == "nothing" else said
        coor.barrier()
        graph.reset()
        comm.abort()
        return said


def oneshot_close_with_a_live_graph(coor: Coordinator) -> str:
    """One rank captured a sum: close() is refused on all, and the sums go on."""
    comm = Communicator._of(Nccl, coor, device=0, oneshot=True, checked_calls=0)
    tensor, graph = torch.ones(1024, dtype=torch.bfloat16, device=GPU), torch.cuda.CUDAGraph()
    if coor.is_master():
        with torch.cuda.graph(graph):  # the first sum of this dtype
            comm.allreduce(tensor)
    said = _told(comm.close)
    graph.replay() if coor.is_master() else comm.allreduce(tensor)
    comm.synchronize()
    assert tensor.mean().item() == comm.world_size, tensor
    graph.reset()
    comm.close()
    return said


def streams(coor: Coordinator) -> list[float]:
    """Calls go where torch works: after what was enqueued before, and the host does not wait."""
    with Communicator._of(Nccl, coor, device=0) as comm:
        tensor = torch.zeros(1000, device=GPU)
        comm.allreduce(tensor)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)  # most of a second
            tensor.fill_(1)
            comm.allreduce(tensor)
            event = side.record_event()
        torch.cuda.set_sync_debug_mode("default")
        found = [float(event.query())]
        event.synchronize()
        found.append(tensor.mean().item())
        with Communicator._of(Nccl, coor, device=0, stream=side) as given:
            tensor.fill_(1)
            torch.cuda.synchronize()
            given.allreduce(tensor)
            side.synchronize()
            found.append(tensor.mean().item())
        return found


def compiled(coor: Coordinator) -> list[float]:
    """One call inside a compiled function, eager and captured."""
    from communicator import compile as group

    with Communicator._of(Nccl, coor, device=0) as comm:
        name = group.name(comm)
        weight = torch.eye(64, device=GPU) * 2

        def layer(x):
            return group.allreduce(x @ weight, name) + 1

        fast = torch.compile(layer, fullgraph=True)
        x = torch.ones(64, 64, device=GPU)
        with torch.no_grad():
            found = [fast(x).mean().item() for _ in range(3)][-1:]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = fast(x)
            graph.replay()
            comm.synchronize()
        found.append(out.mean().item())
        graph.reset()
        return found


def decode_in_a_graph(coor: Coordinator) -> list[list[int]]:
    """What a model cut over ranks says: whole, step by step, and replayed, sums included."""
    from tests.gpu import decode  # transformers, which no other case needs

    with Communicator._of(Nccl, coor, device=0) as comm:
        decoder = decode.Decoder(decode.small_model(GPU), comm)
        found = [decode.whole_tokens(GPU), decoder.tokens()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.step()
        found.append(decoder.tokens(graph.replay))
        comm.synchronize()
        graph.reset()
        return found


def nano_engine(coor: Coordinator, folder: str) -> list[Any]:
    """The example of an engine: tokens of one process and its own, and how many graphs it made."""
    sys.path.insert(0, str(ROOT / "examples" / "nano_engine"))
    from engine import Engine

    from tests.gpu import decode

    model = decode.small_model(GPU, vocab_size=66)
    if coor.is_master():
        model.save_pretrained(folder)
    coor.barrier()
    with Communicator._of(Nccl, coor, device=0) as comm:
        engine = Engine(folder, coor, comm, slots=2, length=decode.ROOM)
        engine.uses_graphs = True  # also by the stand-in
        tokens, num_graphs = engine.generate(decode.PROMPT * 2, decode.COUNT), len(engine.graphs)
        engine.close()
    prompt = torch.tensor(decode.PROMPT, device=GPU)
    whole = model.generate(prompt, max_new_tokens=decode.COUNT, do_sample=False)
    copies = 2 if coor.is_master() else 0
    return [whole[:, prompt.shape[1] :].tolist() * copies, tokens, num_graphs]


def stages_in_graphs(coor: Coordinator, folder: str) -> list[Any]:
    """Tokens of one process, then of stages; of the other ranks, how many passes were replayed."""
    from tests.gpu import decode  # first: it adds what drumline's modules look for

    # isort: split
    import drumline
    from drumline.stages import cuda_graphs
    from drumline.strategies import pipeline_parallel

    made: list[cuda_graphs.CudaGraphs] = []

    def make(rank: int, device: torch.device) -> cuda_graphs.CudaGraphs:
        made.append(cuda_graphs.CudaGraphs(rank, device))
        return made[-1]

    pipeline_parallel.CudaGraphs = make
    if coor.is_master():
        decode.small_model(GPU).save_pretrained(folder)
    coor.barrier()
    places = [(rank, str(GPU)) for rank in range(coor.world_size)]
    device_map = {"": places[0], "model.layers.1": places[1]}
    room = dict.fromkeys(places, 1 << 28)
    try:
        model = drumline.load(
            folder, device_map=device_map, coor=coor, max_memory=room, cuda_graphs=True
        )
    except drumline.WorkerExit:
        return [each.num_replays for each in made]
    with model:
        prompt = torch.tensor(decode.PROMPT, device=GPU)
        said = model.generate(
            prompt, max_new_tokens=decode.COUNT, do_sample=False, cache_implementation="static"
        )
    return [decode.whole_tokens(GPU), said[0, prompt.shape[1] :].tolist()]


def create_and_destroy(
    coor: Coordinator, times: str = "20", seconds: str = "60", leak: str = ""
) -> dict[str, float]:
    """What one life of a communicator leaves behind, over so many, or as many as there is time.

    leak: anything, to plant one of each kind in every life, which has to be noticed.
    """
    for _ in range(3):
        Communicator._of(Nccl, coor, device=0).close()
    before, lives, end = _holdings(coor), 0, time.monotonic() + float(seconds)
    planted = []
    while lives < int(times) and time.monotonic() < end:
        Communicator._of(Nccl, coor, device=0).close()
        planted += [_leak()] if leak else []
        lives += 1
    after = _holdings(coor)
    left = {name: (after[name] - before[name]) / lives for name in before}
    return left | {"lives": lives}


def _leak() -> object:
    """One of each, and of memory more than is let pass; the caller keeps what must be kept."""
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(MIB)) == 0
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return os.open("/dev/null", os.O_RDONLY), b"x" * (4 * MIB)


def _holdings(coor: Coordinator) -> dict[str, float]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "host_mib": resident / MIB,
        "device_mib": -free_nbytes(coor) / MIB,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def mistakes(coor: Coordinator) -> list[str]:
    """Each is told at once, and the communicator goes on."""
    with Communicator._of(Nccl, coor, device=0) as comm:
        good = torch.ones(4, 6, device=GPU)
        wrong = [
            lambda: comm.allreduce(torch.ones(3)),
            lambda: comm.allreduce(good.t()),
            lambda: comm.allreduce(good.to(torch.complex64), "max"),
            lambda: comm.allreduce(good.to(torch.int16)),
            lambda: comm.allreduce(good, out=torch.empty(3, device=GPU)),
            lambda: comm.allreduce(good, "mean"),
            lambda: comm.allreduce(good, 99),
            lambda: comm.broadcast(good, comm.world_size),
            lambda: comm.send(good, comm.rank),
        ]
        told = [_told(call) for call in wrong]
        comm.allreduce(good)
        comm.synchronize()
    told.append(_told(lambda: comm.allreduce(good)))
    return told


def kept_nans(coor: Coordinator) -> dict[str, bool]:
    """By op and dtype, whether a result is NaN where one rank has NaN."""
    kept = {}
    with Communicator._of(Nccl, coor, device=0) as comm:
        for op, dtype in itertools.product(("sum", "max", "min"), (torch.float32, torch.bfloat16)):
            tensor = torch.ones(1024, dtype=dtype, device=GPU)
            if coor.rank == 1:
                tensor[:] = math.nan
            kept[f"{op} {dtype}"] = bool(comm.allreduce(tensor, op).isnan().all())
    return kept


def _told(call) -> str:
    try:
        call()
    except (DrumlineError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def by_default(coor: Coordinator) -> list[str | float]:
    """The sample of vLLM's RFC 3587."""
    with Communicator(coor) as comm:
        data = torch.ones((1024, 1024)).to(device=f"cuda:{coor.local_rank}")
        comm.allreduce(data)
        return [comm.backend, data.mean().item()]


def _give(result) -> None:
    print(RESULT + json.dumps(result), flush=True)


def main() -> None:
    case, *arguments = sys.argv[1:]
    if GPU.type == "cpu":
        from tests.gpu import stand_in

        globals()["Nccl"] = stand_in.install()
    torch.cuda.set_device(0)
    module, _, name = case.rpartition(".")
    cases = vars(importlib.import_module(f"tests.gpu.{module}")) if module else globals()
    with Coordinator(timeout_s=60) as coor:
        result = cases[name](coor, *([Nccl] if module == "cost_ranks" else []), *arguments)
    _give(result)


if __name__ == "__main__":
    main()
