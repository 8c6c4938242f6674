"""A warning where mpi4py, imported by a rank, does not see the ranks of the launch."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from launcher.launch_info import LaunchInfo

MODULE = "mpi4py.MPI"
log = logging.getLogger("launcher")


def install(info: LaunchInfo) -> None:
    """Check MPI's world as soon as this process imports mpi4py. Costs nothing until then."""
    if info.world_size > 1:
        sys.meta_path.insert(0, MpiImportCheck(info))


class MpiImportCheck:
    """Finds mpi4py.MPI once, by the finders after it, and adds the check to its loader."""

    def __init__(self, info: LaunchInfo) -> None:
        self.info = info

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module, self.info)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], info: LaunchInfo, module: ModuleType) -> None:
    """Load the module. Before MPI_Init, which a program may postpone, its world has no size."""
    execute(module)
    if not module.Is_initialized():
        return
    size = module.COMM_WORLD.Get_size()
    if size != info.world_size:
        log.warning(
            "rank %d: mpi4py sees a world of %d, not the %d ranks of this launch, as the "
            "mpiexec of its MPI did not start them: use `drumline run --launcher mpi`",
            info.rank,
            size,
            info.world_size,
        )
