"""What ranks do with models: the cases of test_stages.py and of the tables of whole models."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.gpu import decode  # first: it adds what drumline's modules look for

# isort: split
import drumline
from communicator import Communicator
from coordinator import Coordinator
from drumline.compile_once import precompile
from drumline.stages.device_link import DeviceLink
from drumline.stages.messages import Message, MessageChannel, MessageKind
from drumline.strategies import serve_stage
from tests.gpu.one_gpu import GPU

ROUNDS, HOPS = 5, 50
ROOM_BYTES = 4 << 30
BIG = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
BIG |= {"num_key_value_heads": 16, "num_hidden_layers": 16, "vocab_size": 32000}
NEW_TOKENS = 64
if GPU.type == "cpu":
    BIG, NEW_TOKENS = {"num_hidden_layers": 4}, 16


def greedy(
    model: Any,
    count: int = decode.COUNT,
    prompt: Sequence[int] = decode.PROMPT[0],
    **options: Any,
) -> list[int]:
    ids = torch.tensor([prompt], device=GPU)
    rows = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, **options)
    return rows[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def save(coor: Coordinator, folder: str, **sizes: Any) -> None:
    if coor.is_master():
        decode.small_model(GPU, **sizes).save_pretrained(folder)
    coor.barrier()


def on_master(coor: Coordinator, folder: str, work: Callable[[Any], Any], **options: Any) -> Any:
    """What work(model) returns on the master; nothing elsewhere."""
    try:
        model = drumline.load(folder, coor=coor, **options)
    except drumline.WorkerExit:
        return None
    with contextlib.ExitStack() as stack:
        if hasattr(type(model), "__exit__"):
            stack.enter_context(model)
        return work(model)


def halves(coor: Coordinator, layers: int) -> dict[str, Any]:
    """The arguments of load() for half of the layers on rank 0, and the rest on rank 1."""
    where = {f"model.layers.{n}": (1, str(GPU)) for n in range(layers // 2, layers)}
    places = [(rank, str(GPU)) for rank in range(coor.world_size)]
    if coor.world_size == 1:
        where = {}
    return {
        "device_map": {"": places[0], **where},
        "max_memory": dict.fromkeys(places, ROOM_BYTES),
    }


def device_hops(coor: Coordinator, folder: str) -> list[Any]:
    """Tokens where hidden states go from device to device, as between ranks with a GPU each."""
    save(coor, folder)
    serve_stage._gpu_id = lambda device: str(coor.rank)
    made: list[Any] = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append("device" in options)
        return Communicator(*arguments, **options)

    serve_stage.Communicator = make
    tokens = on_master(coor, folder, greedy, **halves(coor, 2))
    direct = sum(made)
    return [decode.whole_tokens(GPU), tokens, direct]


def tensor_parallel(coor: Coordinator, folder: str) -> list[Any]:
    """load(tp=2) on a named GPU: every rank calls generate()."""
    save(coor, folder)
    with drumline.load(folder, coor=coor, tp=coor.world_size, device=str(GPU)) as model:
        return [decode.whole_tokens(GPU), greedy(model)]


def tp_stages(coor: Coordinator, folder: str) -> list[Any]:
    """Two stages of two ranks, whose leaders broadcast hidden states from device to device."""
    save(coor, folder)
    room = {(rank, str(GPU)): ROOM_BYTES for rank in range(coor.world_size)}
    options = {"tp": 2, "device": str(GPU), "device_map": "auto", "max_memory": room}
    return [decode.whole_tokens(GPU), on_master(coor, folder, greedy, **options)]


def offloaded(coor: Coordinator, folder: str, place: str) -> list[Any]:
    """A layer whose weights wait in the CPU's memory, or on disk, and come to the GPU to run."""
    save(coor, folder)
    places = {"": (0, str(GPU)), "model.layers.1": (0, place)}
    room = dict.fromkeys([(0, str(GPU)), (0, place)], ROOM_BYTES)
    tokens = on_master(coor, folder, greedy, device_map=places, max_memory=room)
    return [decode.whole_tokens(GPU), tokens]


def batches(coor: Coordinator, folder: str) -> list[Any]:
    """Texts of requests of unequal lengths, each by one process, and batched over two stages."""
    save(coor, folder)
    prompts = [decode.PROMPT[0], [7], [3, 60, 2, 11, 12, 13, 50, 51, 9] * 3, [1, 2]]

    def batched(model: Any) -> list[list[int]]:
        outputs = model.generate_batch(prompts, max_new_tokens=decode.COUNT, do_sample=False)
        assert not any(output.error for output in outputs.values())
        return [output.generated_tokens for output in outputs.values()]

    return [
        [greedy(decode.small_model(GPU), prompt=prompt) for prompt in prompts],
        on_master(coor, folder, batched, **halves(coor, 2)),
    ]


def planned(coor: Coordinator, folder: str) -> list[Any]:
    """Of a model that a GPU holds by half, the rest on the CPU: its tokens, the bytes that may be
    on the GPU, and the most that were."""
    save(coor, folder, **BIG)
    alone = decode.small_model(GPU, **BIG)
    nbytes = sum(tensor.nbytes for tensor in alone.parameters())
    expected = greedy(alone)
    del alone
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    room = {(0, str(GPU)): nbytes // 2, (0, "cpu"): 2 * nbytes}
    options = {"device_map": "auto", "max_memory": room, "batch": 1, "length": 64}
    tokens = on_master(coor, folder, greedy, **options)
    return [expected, tokens, nbytes // 2, torch.cuda.max_memory_allocated()]


def save_with_tokenizer(coor: Coordinator, folder: str) -> list[Any]:
    """Save the model with a tokenizer whose words are the numbers of the tokens; its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(coor, folder)
    numbers = {str(n): n for n in range(decode.SIZES["vocab_size"])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
    return [decode.whole_tokens(GPU)]


def hoisted(coor: Coordinator) -> list[float]:
    """A program exported on the CPU, moved to the GPU, and moved back: its largest errors."""
    layer = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    x, errors = torch.randn(4, 16), []
    with torch.no_grad():
        expected = layer(x)
        program = torch.export.export(layer.eval(), (x,))
        for source, target in (("cpu", GPU), (str(GPU), torch.device("cpu"))):
            drumline.hoist(program, {source: str(target)})
            moved = program.module()
            errors.append((moved(x.to(target)).cpu() - expected).abs().max().item())
    return errors


def precompiled(coor: Coordinator, folder: str) -> list[float]:
    """A layer that one rank compiles for all, each with weights of its own: its error, and whether
    this rank compiled it."""
    torch.manual_seed(coor.rank)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    layer, x = layer.to(GPU).eval(), torch.randn(4, 16, device=GPU)
    compiled: list[Any] = []
    compile_weightless = precompile.compile_weightless

    def compile_here(*arguments: Any) -> bytes:
        compiled.append(arguments)
        return compile_weightless(*arguments)

    precompile.compile_weightless = compile_here
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch.no_grad():
        run = drumline.precompile(layer, (x,), coor, folder=f"{folder}/artifacts", options=quick)
        error = (run(x) - layer(x)).abs().max().item()
    return [error, len(compiled)]


# How fast.


def decoding(coor: Coordinator, folder: str) -> dict[str, list[float]]:
    """Tokens a second of each way to decode the same model; whether they are the same tokens."""
    save(coor, folder, **BIG)
    static = {"cache_implementation": "static"}
    speed = functools.partial(_tokens_per_s, count=NEW_TOKENS)
    found: dict[str, Any] = {}
    if coor.is_master():
        alone = decode.small_model(GPU, **BIG)
        alone.generation_config.disable_compile = True
        found["transformers alone"] = speed(alone)
        found["transformers alone, static cache"] = speed(alone, **static)
        del alone
        for place in ("cpu", "disk"):
            found[f"half of the layers on {place}"] = _offloaded_speed(folder, place)
    coor.barrier()
    split = halves(coor, BIG["num_hidden_layers"])
    found["two stages"] = on_master(coor, folder, speed, **split)
    in_static = functools.partial(speed, **static)
    found["two stages, static cache"] = on_master(coor, folder, in_static, **split)
    found["two stages, graphs"] = on_master(coor, folder, in_static, cuda_graphs=True, **split)
    with drumline.load(folder, coor=coor, tp=coor.world_size, device=str(GPU)) as model:
        found["tp=2"] = speed(model)
    if not coor.is_master():
        return {}
    expected = found["transformers alone"][1]
    return {
        way: [rate, float(tokens == expected[: len(tokens)])]
        for way, (rate, tokens) in found.items()
    }


def _offloaded_speed(folder: str, place: str) -> tuple[float, list[int]]:
    """Of one process whose second half of the layers waits elsewhere until it runs."""
    layers, here, there = BIG["num_hidden_layers"], (0, str(GPU)), (0, place)
    places = {"": here, **{f"model.layers.{n}": there for n in range(layers // 2, layers)}}
    room = dict.fromkeys([here, there], ROOM_BYTES)
    with Coordinator(_alone()) as own:
        model = drumline.load(folder, coor=own, device_map=places, max_memory=room)
        return _tokens_per_s(model, NEW_TOKENS // 4)


def _tokens_per_s(model: Any, count: int, **options: Any) -> tuple[float, list[int]]:
    greedy(model, 8, **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = greedy(model, count, **options)
    return count / (time.perf_counter() - start), tokens


def loading(coor: Coordinator, folder: str) -> dict[str, list[float]]:
    """Seconds until the weights are on the GPU, and GiB a second."""
    import transformers

    save(coor, folder, **BIG)
    found, ranks = {}, halves(coor, BIG["num_hidden_layers"])

    def load_whole() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(folder).to(GPU)

    def load_alone() -> Any:
        with Coordinator(_alone()) as own:
            places, room = {"": (0, str(GPU))}, {(0, str(GPU)): ROOM_BYTES}
            return drumline.load(folder, coor=own, device_map=places, max_memory=room)

    if coor.is_master():
        nbytes = sum(tensor.nbytes for tensor in load_whole().parameters())  # warms files and GPU
        for name, load in {"from_pretrained().to()": load_whole, "load()": load_alone}.items():
            start = time.perf_counter()
            load()
            torch.cuda.synchronize()
            found[name] = time.perf_counter() - start
    coor.barrier()
    start = time.perf_counter()
    on_master(coor, folder, lambda model: None, **ranks)
    found["load() on both ranks, and the end"] = time.perf_counter() - start
    if not coor.is_master():
        return {}
    return {name: [seconds, nbytes / seconds / 2**30] for name, seconds in found.items()}


def _alone() -> Any:
    import launcher

    return launcher.LaunchInfo("alone", 1, 1, 0, 0, "127.0.0.1", 0)


def hops(coor: Coordinator, folder: str) -> dict[str, list[float]]:
    """us one way for a hidden state, through the CPU's memory and from device to device."""
    found: dict[str, list[float]] = {}
    with Communicator(coor, device_type="cpu") as cpu, Communicator(coor, device=GPU) as gpu:
        for nbytes in (8 << 10, 1 << 20, 16 << 20):
            hidden = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=GPU)
            for way, comm in {"CPU's memory": None, "device to device": gpu}.items():
                found[f"{nbytes >> 10} KiB, {way}"] = [_one_way_us(cpu, comm, hidden)]
    return found if coor.is_master() else {}


def _one_way_us(cpu: Communicator, gpu: Communicator | None, hidden: torch.Tensor) -> float:
    """Median of rounds there and back. Two ranks."""
    peer = 1 - cpu.rank
    link = None if gpu is None else DeviceLink(gpu, peer)
    out, into = MessageChannel(cpu, peer, link), MessageChannel(cpu, peer, link)
    message, times = Message(MessageKind.CALL, 1, [1], [hidden]), []

    def receive() -> None:
        (arrived,) = into.receive().tensors
        assert arrived.to(GPU)[-1].item() == 1  # it is there

    steps = [functools.partial(out.send, message), receive][:: 1 if cpu.rank == 0 else -1]
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(HOPS):
            for step in steps:
                step()
        times.append((time.perf_counter() - start) / HOPS / 2 * 1e6)
    return statistics.median(times[1:])
