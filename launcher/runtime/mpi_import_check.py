"""A warning where mpi4py, imported by a rank, does not see the ranks of the launch."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

MODULE = "mpi4py.MPI"
log = logging.getLogger("launcher")


def install(name: str, world_size: int) -> None:
    """Check MPI's world as soon as this process imports mpi4py. Costs nothing until then.

    name: of the rank, or of the ranks that are threads of this process.
    """
    if world_size > 1:
        sys.meta_path.insert(0, MpiImportCheck(name, world_size))


class MpiImportCheck:
    """Finds mpi4py.MPI once, by the finders after it, and adds the check to its loader."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name, self.world_size = name, world_size

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(self._execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Load the module. Before MPI_Init, which a program may postpone, its world has no size."""
        execute(module)
        if not module.Is_initialized():
            return
        size = module.COMM_WORLD.Get_size()
        if size != self.world_size:
            log.warning(
                "%s: mpi4py sees a world of %d, not the %d ranks of this launch, as the "
                "mpiexec of its MPI did not start them: use `drumline run --launcher mpi`",
                self.name,
                size,
                self.world_size,
            )
