"""The public names: for type checkers and editors, and for __init__.py, which imports them."""

from communicator.backend import Backend as Backend
from communicator.backend import Capabilities as Capabilities
from communicator.calls.dtypes import DTYPES as DTYPES
from communicator.calls.dtypes import OPS as OPS
from communicator.calls.dtypes import DtypeInfo as DtypeInfo
from communicator.calls.dtypes import OpInfo as OpInfo
from communicator.calls.dtypes import dtype_info as dtype_info
from communicator.calls.dtypes import op_name as op_name
from communicator.communicator import Communicator as Communicator
from communicator.errors import CommunicatorError as CommunicatorError
from communicator.errors import CommunicatorTimeout as CommunicatorTimeout
from communicator.errors import PeerLost as PeerLost
from communicator.errors import Unsupported as Unsupported
from communicator.selection import backend_class as backend_class
from communicator.selection import backend_names as backend_names
from communicator.selection import import_builtin as import_builtin

__version__: str
