"""Builds the native parts: the binding, and the shared-memory backend as a plugin of its own.

Neither needs headers of torch, CUDA or NCCL. Both keep to Python's limited API, so that one build
serves 3.11 and later.
"""

import copy
import os
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIMITED_API = ("Py_LIMITED_API", "0x030b0000")
FLAGS = ["-std=c++17", "-O2", "-g1", "-fvisibility=hidden", "-Wall", "-Wextra"]
# For loops over elements. Not -O3: with it GCC 12 gives up vectors where there are more than two
# operands, so that the sum over 4 ranks takes two to ten times as long; and it compiles for longer.
VECTORS = ("-ftree-vectorize", "-fvect-cost-model=dynamic")


class Abi3Wheel(bdist_wheel):
    """Tags the wheel abi3: every extension here keeps to the limited API."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp311"
        super().finalize_options()


class SeparateObjects(build_ext):
    """Keeps the objects of an extension in a folder of its own: two are built at a time."""

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(own, ext)


def sources(*folders: str) -> list[str]:
    return sorted(path for folder in folders for path in glob(f"csrc/{folder}/*.cpp"))


def extension(
    name: str, files: list[str], libraries: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> Extension:
    return Extension(
        name,
        files,
        include_dirs=["csrc"],
        depends=glob("csrc/**/*.h", recursive=True),
        define_macros=[LIMITED_API],
        extra_compile_args=[*FLAGS, *flags],
        libraries=list(libraries),
        py_limited_api=True,
        language="c++",
    )


setup(
    license="Apache-2.0",
    ext_modules=[  # two are built at a time: the longest first
        # Not a Python module: a vendor library like any other, opened through communicator.h.
        extension(
            "communicator.backends._shm",
            sources("shm", "reduce", "system"),
            ("pthread", "rt"),
            VECTORS,
        ),
        extension(
            "communicator.backends._tcp",
            sources("tcp", "encryption", "reduce", "python/convert"),
            ("dl",),
            VECTORS,
        ),
        extension(
            "communicator.backends.nccl._nccl",
            sources("nccl"),
            ("dl", "pthread"),
        ),
        extension("communicator._native", sources("python", "python/convert"), ("dl",), ("-O3",)),
        extension("coordinator._node_shm", sources("node_shm")),
        extension(
            "drumline.weight_formats._packed",
            sources("packed"),
            ("dl",),
            (*VECTORS, "-ffp-contract=off"),
        ),
        extension(
            "drumline.core.cpu._products",
            sources("products"),
            ("dl",),
            (*VECTORS, "-ffp-contract=fast", "-Wno-psabi"),
        ),
        extension("launcher._encryption", sources("encryption", "encryption/python"), ("dl",)),
    ],
    options={"build_ext": {"parallel": 2}},
    cmdclass={
        "build_ext": SeparateObjects,
        **({} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": Abi3Wheel}),
    },
)
