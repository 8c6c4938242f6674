"""A stand-in for torch.cuda: streams write down whom they wait for, and nothing runs on them."""

import contextlib
import threading

import torch


class Stream:
    def __init__(self):
        self.device, self.cuda_stream, self.is_capturing = "cpu", 0x5EED, False
        self.followed = []  # streams that it waited for
        self.kept = []  # tensors whose memory it uses

    def wait_stream(self, other):
        self.followed.append(other)


class CudaOnCpu(threading.local):
    """torch.cuda as one thread sees it."""

    def __init__(self):
        self.current = Stream()

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


def install(monkeypatch):
    """Put the stand-in in the place of torch.cuda, and return it."""
    cuda = CudaOnCpu()
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: cuda.current)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: cuda.current.is_capturing
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: stream.kept.append(tensor)
    )
    return cuda
