"""Tensors from device to device: a whole pipeline on the CPU, and their order with stand-ins."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

import drumline
import launcher
from communicator import Communicator
from coordinator import Coordinator
from drumline.stages import tp_stage
from drumline.stages.device_link import DeviceLink
from drumline.stages.messages import Message, MessageChannel, MessageKind
from drumline.stages.ring import Ring
from drumline.strategies import pipeline_tp, serve_stage
from tests.communicator.backends.nccl import cuda_on_cpu

TWO = 2


@pytest.fixture
def links(monkeypatch):
    """Communicators of shared memory in the place of those between GPUs; counts their tensors."""
    sent = []

    def open_all(coor, device, backend, stack):
        comms = [stack.enter_context(Communicator(coor, device=device)) for _ in range(TWO)]
        for comm in comms:
            send = comm.send
            comm.send = lambda tensor, peer, send=send: sent.append(tensor) or send(tensor, peer)
        return comms

    monkeypatch.setattr(serve_stage, "open_device_communicators", open_all)
    return sent


def test_tensors_with_gaps_arrive_with_their_own_values(ranks):
    """generate() slices the last position of several rows, and masks are expanded."""
    rows = torch.arange(24.0).view(3, 4, 2)
    tensors = [rows[:, -1:], rows[..., ::2], rows[0, :, :1].expand(4, 5), rows.transpose(0, 2)]

    def body(info):
        with (
            Coordinator(info) as coor,
            Communicator(coor) as comm,
            Communicator(coor) as between_devices,
        ):
            channel = MessageChannel(
                comm, 1 - info.rank, DeviceLink(between_devices, 1 - info.rank)
            )
            if info.rank == 0:
                channel.send(Message(MessageKind.CALL, tensors=tensors))
                return True
            pairs = zip(channel.receive().tensors, tensors, strict=True)
            return [torch.equal(*pair) for pair in pairs]

    assert ranks(body, 2) == [True, [True] * 4]


def say(model, rows=2, count=12):
    ids = torch.arange(3, 3 + 9 * rows).view(rows, 9) % 60
    return model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None).tolist()


@pytest.mark.parametrize("nprocs", [2, 3])
def test_tokens_are_the_same_where_tensors_go_from_device_to_device(
    checkpoints, on_master, links, nprocs
):
    plain, path = checkpoints.llama()
    assert on_master(path, nprocs, say) == say(plain)
    assert len(links) >= 12 * nprocs  # a hidden state for each hop of each token


def test_micro_batches_pass_each_other_on_their_way(checkpoints, on_master, links):
    """Each thread of the master sends while another waits for what comes back."""
    plain, path = checkpoints.llama()

    def work(model):
        model.micro_batches = TWO
        return say(model, rows=4, count=3)

    assert on_master(path, 2, work) == say(plain, rows=4, count=3)


def test_stages_of_tp_groups_pass_tensors_on_from_device_to_device(checkpoints, links, monkeypatch):
    """Between the leaders, and from each leader to its group."""
    plain, path = checkpoints.llama()
    monkeypatch.setattr(pipeline_tp, "_carries_tensors", lambda comm: True)
    receive, by_group = DeviceLink.receive, []

    def note(link, forms):
        by_group.append(isinstance(link.comm, tp_stage._BroadcastCommunicator))
        return receive(link, forms)

    monkeypatch.setattr(DeviceLink, "receive", note)

    def rank():
        torch.set_num_threads(1)
        with drumline.load(path, tp=2, device_map="auto") as model:
            return say(model, count=2)

    found = launcher.launch(rank, nprocs=4, launcher="threads", timeout_s=100)[0]
    assert found == say(plain, count=2) and links
    assert {*by_group} == {True, False}


def test_what_arrived_while_a_rank_failed_is_not_used():
    """Its stage passes on memory that its own receive, which was ended, never filled."""

    def raise_cause(error):
        raise drumline.PeerLost(f"rank 1 is lost: {error}")

    ring = object.__new__(Ring)
    ring.monitor = types.SimpleNamespace(has_failed=True, raise_cause=raise_cause, waits=[])
    ring.previous = types.SimpleNamespace(peer=1, link="any", receive=lambda predicted: "message")
    with pytest.raises(drumline.PeerLost, match="while tensors were on their way"):
        ring.receive()
    ring.previous.link = None  # through the CPU a message is whole or not there
    assert ring.receive() == "message"


class Noting:
    """A communicator of a GPU, which notes on which stream it is called."""

    device, device_type = torch.device("cpu"), "cuda"

    def __init__(self, cuda):
        self.cuda, self.log = cuda, []

    @contextlib.contextmanager
    def group(self):
        yield
        self.log.append("start")

    def send(self, tensor, peer):
        self.log.append(("send", tensor.numel(), self.cuda.current))

    def recv(self, tensor, peer):
        self.log.append(("recv", tensor.numel(), self.cuda.current))

    def synchronize(self, timeout_s):
        self.log.append(("wait", self.cuda.current))


def test_the_master_alone_waits_and_receives_on_a_stream_of_its_own(monkeypatch):
    """On one stream with its sends it would wait for a rank that waits for it."""
    cuda = cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: cuda_on_cpu.Stream())
    comm = Noting(cuda)
    comm.device = types.SimpleNamespace(type="cuda")
    master, stage = DeviceLink(comm, 1, waits=True), DeviceLink(comm, 1)
    comm.device = torch.device("cpu")
    form = (torch.bfloat16, (2, 3), (1, 2))
    master.send([torch.ones(5)])
    (got,) = master.receive([form])
    stage.receive([form])
    assert got.shape == (2, 3) and got.stride() == (1, 2)
    own = comm.log[2][2]
    assert own is not cuda.current and own.followed == []
    assert comm.log == [
        *[("send", 20, cuda.current), "start"],
        *[("recv", 12, own), "start", ("wait", own)],
        *[("recv", 12, cuda.current), "start"],
    ]


def devices(monkeypatch, names, fail_on=()):
    """What each rank of threads gets whose GPUs have these ids."""
    monkeypatch.setattr(serve_stage, "_gpu_id", lambda name: name)
    opened = []

    def make(coor, device):
        opened.append(coor.rank)
        if coor.rank in fail_on:
            raise drumline.DrumlineError("no way between them")
        return contextlib.nullcontext(device)

    monkeypatch.setattr(serve_stage, "Communicator", make)

    def rank():
        with drumline.Coordinator() as coor, contextlib.ExitStack() as stack:
            backend = "tcp" if names[coor.rank] == "named" else None
            return serve_stage.open_device_communicators(coor, names[coor.rank], backend, stack)

    return launcher.launch(rank, nprocs=len(names), launcher="threads", timeout_s=60), opened


@pytest.mark.parametrize("names", [["a", ""], ["a", "a"], ["a", "named"]])
def test_tensors_go_through_the_cpu_unless_every_rank_has_a_gpu_of_its_own(monkeypatch, names):
    assert devices(monkeypatch, names) == ([[], []], [])


def test_each_rank_with_a_gpu_of_its_own_gets_two_communicators_of_it(monkeypatch):
    found, opened = devices(monkeypatch, ["a", "b"])
    assert found == [["a", "a"], ["b", "b"]] and sorted(opened) == [0, 0, 1, 1]


def test_a_way_that_fails_on_one_rank_is_given_up_on_all(monkeypatch, caplog):
    found, _ = devices(monkeypatch, ["a", "b"], fail_on=[1])
    assert found == [[], []] and "through the CPU's memory: no way between them" in caplog.text
