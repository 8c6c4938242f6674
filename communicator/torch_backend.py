"""The documented name of communicator.torch_interop.process_group."""

from communicator.torch_interop.process_group import *  # noqa: F403
