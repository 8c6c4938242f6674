"""Adapters by which inference engines work on the lower layers, unchanged."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from communicator import Unsupported

PLAIN = (bool, int, float, str, type(None))


OWN_FOLDER = Path(__file__).parent


def record_of(engine: str, folder: Path = OWN_FOLDER) -> dict[str, Any]:
    """The interface of an engine that its adapter was written for.

    The version that it was read from, and by class or module the functions that the adapter calls
    or replaces, each with its parameters. folder: of the record, in an adapter that is elsewhere.
    """
    record: dict[str, Any] = json.loads((folder / f"{engine}_signatures.json").read_text())
    return record


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, with the values that they have if not passed.

    A value that is not a number, text, True, False or None is "...".
    """
    listed = inspect.signature(function).parameters.values()
    return [
        item.name
        if item.default is item.empty
        else f"{item.name}={repr(item.default) if isinstance(item.default, PLAIN) else '...'}"
        for item in listed
    ]


def check_signatures(engine: str, version: str, *owners: str, folder: Path = OWN_FOLDER) -> None:
    """Raise Unsupported, with its name, for a function that is not as the adapter knows it.

    owners: full names of classes or modules of the record. What matches the record is accepted,
    whatever its version.
    """
    record = record_of(engine, folder)
    for owner in owners:
        try:
            importlib.import_module(owner.rpartition(".")[0])  # says why it cannot be imported
            installed = pkgutil.resolve_name(owner)
        except (ModuleNotFoundError, AttributeError):  # it has another name there
            installed = None
        for name, expected in record[owner].items():
            function = None if installed is None else inspect.getattr_static(installed, name, None)
            function = getattr(function, "__func__", function)  # of a classmethod
            actual = parameters(function) if callable(function) else None
            if actual != expected:
                raise _mismatch(engine, version, f"{owner}.{name}", expected, actual, record)


def _mismatch(
    engine: str,
    version: str,
    function: str,
    expected: list[str],
    actual: list[str] | None,
    record: dict[str, Any],
) -> Unsupported:
    now = "is not there" if actual is None else f"is called with ({', '.join(actual)})"
    variable, package = f"DRUMLINE_{engine.upper()}", engine.partition("_")[0]  # of vllm_cuda: vllm
    recorded = f"{package} {record['version']}"
    return Unsupported(
        f"{variable}=1 with {package} {version}: {function} {now}, and in {recorded}, for which "
        f"drumline's adapter was written, with ({', '.join(expected)}), so its calls would be "
        f"wrong. Install {recorded}, or unset {variable} to run {package} without drumline."
    )
