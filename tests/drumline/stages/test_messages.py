"""Messages keep every value, and those of a generation are one frame each."""

from __future__ import annotations

import queue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from communicator import DTYPES
from drumline.stages.messages import (
    HEADER,
    MAX_FRAME_NBYTES,
    MIN_FRAME_NBYTES,
    Message,
    MessageChannel,
    MessageKind,
)


class Pipe:
    """A communicator from one thread to itself, which counts the frames."""

    def __init__(self) -> None:
        self.frames: queue.Queue[torch.Tensor] = queue.Queue()
        self.sizes: list[int] = []

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.sizes.append(tensor.numel())
        self.frames.put(tensor.clone())

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return tensor.copy_(self.frames.get_nowait())


def link() -> tuple[Pipe, MessageChannel, MessageChannel]:
    pipe = Pipe()
    return pipe, MessageChannel(pipe, 1), MessageChannel(pipe, 0)


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20),
    st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4),
    st.text(max_size=3000),
    st.text(max_size=50),
)
def test_a_message_arrives_as_it_was_sent(ints, shapes, text, note):
    _, sender, receiver = link()
    tensors = [torch.randn(shape) for shape in shapes]
    for kind in MessageKind:
        sender.send(Message(kind, 5, ints, tensors, text, note))
        got = receiver.receive()
        assert (got.kind, got.program, got.ints) == (kind, 5, ints)
        assert (got.text, got.note) == (text, note)
        assert all(torch.equal(a, b) for a, b in zip(got.tensors, tensors, strict=True))


@pytest.mark.parametrize("dtype", [info.torch for info in DTYPES if info.is_reduced], ids=str)
def test_every_dtype_travels(dtype):
    _, sender, receiver = link()
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    sender.send(Message(MessageKind.CALL, tensors=[tensor.t(), tensor[:, :1].expand(2, 4)]))
    got = receiver.receive().tensors
    as_bytes = [part.contiguous().view(torch.uint8) for part in (got[0], tensor.t().contiguous())]
    assert got[0].dtype == dtype and torch.equal(*as_bytes)
    assert got[1].shape == (2, 4)


@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (3, 1, 0, 2), (1, 0, 2, 3)])
def test_tensors_arrive_with_their_axes_in_the_same_order_in_memory(axes):
    """Convolutions round by it: ConvNeXt's channels lie last, and its logits differed by an ulp."""
    _, sender, receiver = link()
    dense = torch.randn(2, 3, 4, 5).permute(axes)
    gaps = torch.randn(4, 6).t()[::2]
    for _ in range(2):
        sender.send(Message(MessageKind.CALL, tensors=[dense, gaps, torch.ones(3)]))
        got = receiver.receive().tensors
        assert torch.equal(got[0], dense) and got[0].stride() == dense.stride()
        assert torch.equal(got[1], gaps) and got[1].is_contiguous()
        assert got[2].tolist() == [1, 1, 1]


def test_a_tensor_that_is_conjugated_or_negated_when_it_is_read_travels_as_it_reads():
    """Memory was copied, and so a conjugate arrived as what it was made of."""
    _, sender, receiver = link()
    waves = torch.randn(3, dtype=torch.complex64)
    tensors = [waves.conj(), torch._neg_view(torch.randn(3))]
    sender.send(Message(MessageKind.CALL, tensors=tensors))
    assert all(map(torch.equal, receiver.receive().tensors, tensors))


def decoded_token(cached: int, width: int = 4096) -> Message:
    """What one token of a padded batch sends: hidden, cos, sin, positions, mask."""
    hidden = torch.zeros(4, 1, width, dtype=torch.bfloat16)
    angles = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
    mask = torch.zeros(4, 1, 1, cached, dtype=torch.bool)
    positions = torch.zeros(4, 1, dtype=torch.int64)
    return Message(MessageKind.CALL, 3, [1], [hidden, angles, angles.clone(), positions, mask])


def test_the_tokens_of_a_generation_are_one_frame_each():
    pipe, sender, receiver = link()
    for cached in range(100, 400):
        sender.send(decoded_token(cached))
        receiver.receive()
    assert len(pipe.sizes) == 301  # the first message had to say how large it is


def test_what_a_token_adds_to_its_tensors_is_less_than_a_hundred_bytes():
    message = decoded_token(100)
    del message.tensors[-1]  # no mask: the usual case of one prompt
    described = sum(2 + 4 * tensor.dim() for tensor in message.tensors)
    assert HEADER.size + described + 8 * len(message.ints) < 100


def test_a_message_may_have_any_number_of_integers_and_tensors():
    _, sender, receiver = link()
    ints, tensors = list(range(1 << 16)), [torch.full((1, 1, 1), float(n)) for n in range(5000)]
    sender.send(Message(MessageKind.CALL, ints=ints, tensors=tensors))
    received = receiver.receive()
    assert received.ints == ints and torch.equal(torch.cat(received.tensors), torch.cat(tensors))


def test_a_long_prompt_does_not_make_the_following_frames_long():
    """Over a link of 200 Mbit/s a first token as long as a prompt of 1 MiB took 84 ms more; and
    one of 64 KiB, which TCP sends in parts after a pause, two delays of the link more."""
    pipe, sender, receiver = link()
    for width in (64, 1 << 17, 64, 64):
        sender.send(decoded_token(1, width=width))
        receiver.receive()
    first, *_, last_but_one, last = pipe.sizes
    assert MAX_FRAME_NBYTES <= 1 << 16 and first == MIN_FRAME_NBYTES
    assert last_but_one == last < 4 * MIN_FRAME_NBYTES


def test_a_message_longer_than_a_frame_is_predicted_too():
    _, sender, receiver = link()
    predictions = []
    for value in range(3):
        sent = torch.full((1 << 16,), value)
        sender.send(Message(MessageKind.CALL, 3, [1], [sent]))
        message = receiver.receive(predictions.append)
        assert torch.equal(message.tensors[0], sent)
    assert message is predictions[1]


def test_a_channel_that_was_used_in_inference_mode_is_of_use_outside_of_it():
    """Its memory could not be written to there; nor could what one thread received for another."""
    _, sender, receiver = link()
    columns = torch.rand(4, 40).t()
    with torch.inference_mode():
        sender.send(Message(MessageKind.CALL, tensors=[torch.ones(999)]))
        (received,) = receiver.receive().tensors
    assert torch.equal(received.add_(1), torch.full((999,), 2.0))
    sender.send(Message(MessageKind.CALL, tensors=[columns[::2]]))
    assert torch.equal(receiver.receive().tensors[0], columns[::2])


def test_a_write_into_one_tensor_of_a_message_is_none_into_the_others():
    """They share memory, and torch counts the writes into all views of one together."""
    _, sender, receiver = link()
    sender.send(Message(MessageKind.CALL, tensors=[torch.ones(9), torch.ones(9)]))
    one, other = receiver.receive().tensors
    before = other._version
    one.zero_()
    assert other._version == before and other.sum() == 9
