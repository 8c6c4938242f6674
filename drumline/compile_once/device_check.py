"""Checks that every tensor of a program, or of a step, is on the device that it should be on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from coordinator import torch_private
from drumline.compile_once.device_mapping import (
    FIXED_TYPES,
    HoistError,
    HoistReport,
    normalize_device,
)


def check_devices(
    artifact: Any, *, inputs: tuple[Any, ...] | None = None, report: HoistReport | None = None
) -> None:
    """Raise HoistError unless every node computes where its metadata says; moves no data.

    Needs the metadata of tracing, or `inputs`. Operators that this build of torch cannot
    propagate (for a device it was not built for) are listed in report.unchecked.
    """
    report = HoistReport() if report is None else report
    if isinstance(artifact, ExportedProgram):
        _check_state(artifact)
        artifact = artifact.graph_module
    for name, inner in artifact.named_modules():
        if name and isinstance(inner, fx.GraphModule):
            _check_graph(inner, None, report)
    _check_graph(artifact, inputs, report)


def _check_graph(
    artifact: fx.GraphModule, inputs: tuple[Any, ...] | None, report: HoistReport
) -> None:
    """Check one graph. Those of control flow are checked apart: propagation skips some of them."""
    fakes = [_traced_value(node) for node in artifact.graph.nodes if node.op == "placeholder"]
    modes = [
        leaf.fake_mode
        for leaf in torch_private.tree_leaves(fakes)
        if isinstance(leaf, torch_private.FakeTensor)
    ]
    mode = modes[0] if modes else torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    if inputs is not None:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    elif any(fake is None for fake in fakes):
        report.unchecked.append("graph without metadata: pass inputs=")
        return
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            DeviceChecker(artifact, report).run(*fakes)
    finally:
        mode.allow_non_fake_inputs = allowed


def _traced_value(node: fx.Node) -> Any:
    """The traced value of a node: torch.export has one name for it and Dynamo another."""
    return node.meta.get("val", node.meta.get("example_value"))


class DeviceChecker(fx.Interpreter):
    """Runs a graph on fake tensors, and compares each node's device with its metadata."""

    def __init__(self, module: fx.GraphModule, report: HoistReport):
        super().__init__(module)
        self.report = report

    def run_node(self, node: fx.Node) -> Any:
        expected = _traced_value(node)
        try:
            result = super().run_node(node)
        except Exception as error:
            if "device" in type(error).__name__.lower() or "device" in str(error).split("\n")[0]:
                raise HoistError(
                    f"node {node.name} mixes devices ({error}), so only a part of the program was "
                    "moved; do not use it, and report the operator."
                ) from error
            if expected is None:
                raise
            self.report.unchecked.append(node.name)
            return expected
        pairs = zip(tensor_leaves(result), tensor_leaves(expected), strict=False)
        for computed, traced in pairs:
            if computed.device != traced.device:
                raise HoistError(
                    f"node {node.name} computes on {computed.device} and should on "
                    f"{traced.device}, so only a part of the program was moved; do not use it."
                )
        return result


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _check_state(program: ExportedProgram) -> None:
    """Raise unless parameters, buffers and constants are where the graph expects them."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    stored = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        tensor, value = stored.get(spec.target or ""), values.get(spec.arg.name)
        if (
            isinstance(tensor, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and tensor.device != value.device
        ):
            raise HoistError(
                f"{spec.target} is on {tensor.device} and the graph expects it on "
                f"{value.device}, so only a part of the program was moved; do not use it."
            )


def assert_device(device: str | torch.device) -> Callable[[Any], Any]:
    """A check: assert_device("cuda:3")(values) returns values if all their tensors are there."""
    expected = normalize_device(device)
    if expected.type not in FIXED_TYPES and expected == torch.device(expected.type):
        raise HoistError(
            f"{device} is any of several devices, so a tensor on another rank's would pass; say "
            f"which one: assert_device(f'{expected.type}:{{coor.local_rank}}')."
        )

    def check(values: Any) -> Any:
        for number, tensor in enumerate(tensor_leaves(values)):
            if tensor.device != expected:
                raise HoistError(
                    f"tensor {number} of shape {tuple(tensor.shape)} is on {tensor.device}, and "
                    f"this rank computes on {expected}; the first such tensor of the step."
                )
        return values

    return check
