"""Move tensors among ranks, over the best backend that every rank can use.

with Communicator(Coordinator()) as comm:
    comm.allreduce(torch.ones(4))
"""

from importlib.metadata import PackageNotFoundError, version

from communicator.backend import Backend, Capabilities
from communicator.calls.dtypes import DTYPES, OPS, DtypeInfo, OpInfo, dtype_info, op_name
from communicator.communicator import Communicator
from communicator.errors import CommunicatorError, CommunicatorTimeout, PeerLost, Unsupported
from communicator.selection import backend_class, backend_names, import_builtin

try:
    __version__ = version("drumline")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "unknown"

__all__ = [
    "DTYPES",
    "OPS",
    "Backend",
    "Capabilities",
    "Communicator",
    "CommunicatorError",
    "CommunicatorTimeout",
    "DtypeInfo",
    "OpInfo",
    "PeerLost",
    "Unsupported",
    "backend_class",
    "backend_names",
    "dtype_info",
    "import_builtin",
    "op_name",
]
