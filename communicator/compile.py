"""The documented name of communicator.torch_interop.compile."""

from communicator.torch_interop.compile import allreduce, name

__all__ = ["allreduce", "name"]
