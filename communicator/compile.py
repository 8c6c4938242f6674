"""The documented name of communicator.torch_interop.compiled_allreduce."""

from communicator.torch_interop.compiled_allreduce import allreduce, name

__all__ = ["allreduce", "name"]
