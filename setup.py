"""Builds the native parts: the binding, and the shared-memory backend as a plugin of its own.

Neither needs torch, CUDA or NCCL headers. Both use Python's limited API, so one build serves 3.10 on.
"""

import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

LIMITED_API = ("Py_LIMITED_API", "0x030a0000")
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]


class Abi3Wheel(bdist_wheel):
    """Tags the wheel abi3: every extension here keeps to the limited API."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


def extension(name: str, source: str, libraries: tuple[str, ...] = ()) -> Extension:
    return Extension(
        name,
        [source],
        include_dirs=["csrc"],
        depends=["csrc/communicator.h"],
        define_macros=[LIMITED_API],
        extra_compile_args=FLAGS,
        libraries=list(libraries),
        py_limited_api=True,
        language="c++",
    )


setup(
    ext_modules=[
        extension("communicator._native", "csrc/binding.cpp", ("dl",)),
        # Not a Python module: a vendor library like any other, opened through communicator.h.
        extension("communicator._shm", "csrc/shm.cpp", ("pthread", "rt")),
    ],
    cmdclass={"bdist_wheel": Abi3Wheel} if not sysconfig.get_config_var("Py_GIL_DISABLED") else {},
)
