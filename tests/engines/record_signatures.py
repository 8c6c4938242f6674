"""The methods that vLLM's groups call on a communicator, of the vLLM that is installed.

python record_signatures.py ../../drumline/engines/vllm_signatures.json         # renews the record
python record_signatures.py --check ../../drumline/engines/vllm_signatures.json

One whose name has `cuda` is of the communicator for CUDA, as that of examples/vllm_cuda_plugin.
"""

import inspect
import json
import sys
from pathlib import Path

import vllm
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from drumline.engines import parameters


def methods(kind: type) -> dict[str, list[str]]:
    """What a class has for others, and its constructor."""
    return {
        name: parameters(item)
        for name, item in vars(kind).items()
        if inspect.isfunction(item) and (name == "__init__" or not name.startswith("_"))
    }


def recorded(path: Path) -> dict[str, object]:
    of_device = CudaCommunicator if "cuda" in path.name else CpuCommunicator
    kinds = (DeviceCommunicatorBase, of_device)
    methods_of = {f"{kind.__module__}.{kind.__name__}": methods(kind) for kind in kinds}
    return {"version": vllm.__version__, **methods_of}


if __name__ == "__main__":
    path = Path(sys.argv[-1])
    if sys.argv[1] != "--check":
        path.write_text(json.dumps(recorded(path), indent=1) + "\n")
    elif {**json.loads(path.read_text()), "version": vllm.__version__} != recorded(path):
        sys.exit(f"{path} is not of the vLLM that is installed, {vllm.__version__}")
