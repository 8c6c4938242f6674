"""The methods that vLLM's groups call on a communicator, of the vLLM that is installed.

python record_signatures.py ../drumline/engines/vllm_signatures.json         # renews the record
python record_signatures.py --check ../drumline/engines/vllm_signatures.json
"""

import inspect
import json
import sys
from pathlib import Path

import vllm
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


def parameters(method: object) -> list[str]:
    """Their names, with the values that they have if they are not passed."""
    listed = inspect.signature(method).parameters.values()
    return [
        item.name if item.default is item.empty else f"{item.name}={item.default!r}"
        for item in listed
    ]


def methods(kind: type) -> dict[str, list[str]]:
    return {name: parameters(item) for name, item in vars(kind).items() if inspect.isfunction(item)}


def recorded() -> dict[str, object]:
    kinds = (DeviceCommunicatorBase, CpuCommunicator, CudaCommunicator)
    return {"version": vllm.__version__, **{kind.__name__: methods(kind) for kind in kinds}}


if __name__ == "__main__":
    path = Path(sys.argv[-1])
    if sys.argv[1] != "--check":
        path.write_text(json.dumps(recorded(), indent=1) + "\n")
    elif json.loads(path.read_text()) != recorded():
        sys.exit(f"{path} is not of the vLLM that is installed, {vllm.__version__}")
