"""A stage: the layers that one rank or a TP group holds, run for the master."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from drumline.contact import cache_layers
from drumline.contact.caches import held_tensors, iter_caches
from drumline.core import pytree
from drumline.errors import DrumlineError, StageError, describe_with_traceback
from drumline.kv_cache.owner import CacheRegistry
from drumline.kv_cache.placeholder import EMPTY_LAYER, LayerVersion, version_of
from drumline.stages import message_trace
from drumline.stages.cuda_graphs import CudaGraphs
from drumline.stages.messages import Message, MessageKind
from drumline.stages.program import NOTHING, Program, StageRoute, StageStep
from drumline.stages.ring import StageRing


class StageCall:
    """The arguments of a step, which the next step may use again with another hidden state."""

    def __init__(
        self, step: StageStep, inputs: list[torch.Tensor], ints: list[int], caches: CacheRegistry
    ):
        self.inputs = inputs
        arrived = pytree.Unflattener(iter(ints[step.ints_at :]), inputs, caches)
        self.args, self.kwargs = pytree.unflatten(step.arguments, arrived)
        self.shared, self.containers = arrived.shared, arrived.containers
        self.before = [dict(shared) for shared in arrived.shared]

    def reuse(self, hidden: torch.Tensor) -> None:
        self.inputs[0] = hidden
        self.args = (hidden, *self.args[1:])

    def is_plain(self, value: Any) -> bool:
        """True if PLAIN describes `value`; most are plain, and to describe them takes long."""
        if type(value) is not torch.Tensor or self.shared or not self.inputs:
            return False
        for tensor in self.inputs:
            if value is tensor:
                return False
        first = self.inputs[0]
        return value.shape == first.shape and value.dtype == first.dtype

    def written(self, inputs_before: list[torch.Tensor]) -> list[int]:
        """The positions of the inputs that the layer wrote into."""
        pairs = enumerate(zip(inputs_before, self.inputs, strict=False))
        return [
            at
            for at, (old, now) in pairs
            if not torch.equal(old, now) and bool(((old != now) & (old == old)).any())
        ]

    # A version is a layer's number of tokens, and whether it has a recurrent state. Compared around
    # the first call of a layer, versions show the master which layers of the cache it fills.
    def layer_versions(self) -> list[LayerVersion]:
        """The version of each layer of the first cache among the arguments."""
        return [version_of(layer) for layer in self._cache_layers()]

    def _cache_layers(self) -> list[Any]:
        cache = next(iter_caches((self.args, self.kwargs)), None)
        return [] if cache is None else cache.layers

    def cache_facts(self, before: list[LayerVersion]) -> tuple[list[Any], list[int], list[Any]]:
        """Of the layers of the cache that hold more than before: their index, tokens before, and
        tokens now; which of them cannot be cropped; the shapes of their keys and values."""
        layers = self._cache_layers()
        pairs = itertools.zip_longest(before, self.layer_versions(), fillvalue=EMPTY_LAYER)
        filled = [
            (index, old.length, new.length)
            for index, (old, new) in enumerate(pairs)
            if new.length > old.length or new.has_state > old.has_state
        ]
        kept = [index for index, _, _ in filled if not cache_layers.is_croppable(layers[index])]
        return filled, kept, [cache_layers.shapes(layers[index]) for index, _, _ in filled]

    def items(self) -> list[Any]:
        """The items of the lists and dicts among the arguments, before each of these itself."""
        return [
            item
            for held in self.containers
            for item in (*held, *(held.values() if isinstance(held, dict) else ()), held)
        ]

    def check_items(self, before: list[Any], module: str) -> None:
        """Raise DrumlineError if the layer wrote into a list or dict: it is a copy, made here."""
        if [*map(id, before)] != [*map(id, self.items())]:
            raise DrumlineError(
                f"{module} wrote into a list or dict that it was given, of which its rank has a "
                "copy, so that nobody sees it; give it a collections.UserDict, whose items travel, "
                "or give the layer to rank 0 in device_map."
            )

    def handed_on(self) -> list[dict[str, Any]]:
        """The items that the layer wrote into each dict, for later layers."""
        pairs = zip(self.before, self.shared, strict=True)
        return [
            {key: value for key, value in now.items() if old.get(key) is not value}
            for old, now in pairs
        ]

    def describe(
        self, value: Any, new: list[torch.Tensor], written: Sequence[int] = ()
    ) -> pytree.TreeSpec:
        output = pytree.flatten_output([value, *self.handed_on()], self.inputs, new)
        new.extend(self.inputs[at] for at in written)
        return (*output, *[("written", at) for at in written])


class Stage:
    """Runs its steps of each program that passes, as graphs if given, and hands the rest on."""

    def __init__(
        self, model: Any, ring: StageRing, device: torch.device, graphs: CudaGraphs | None = None
    ):
        self.ring, self.rank, self.device, self.graphs = ring, ring.rank, device, graphs
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.caches = CacheRegistry(getattr(model, "config", None))
        self.routes: dict[int, StageRoute] = {}
        self._prebuilt: tuple[Message, StageCall] | None = None
        self._scalings: set[int] = set()  # that are done
        self._current_step = ""  # for the error that it raises
        message_trace.trace_stage(self)

    def serve(self) -> int:
        """Until the master leaves; its exit code. Raises PeerLost if a neighbour dies instead."""
        with torch.inference_mode() if self._is_plain() else torch.no_grad():
            return self._serve()

    def _is_plain(self) -> bool:
        """True if all weights are tensors of torch itself; quanto's take no inference mode."""
        weights = itertools.chain(*(m.parameters(recurse=False) for m in self.modules.values()))
        return {type(weight) for weight in weights} <= {nn.Parameter}

    def _serve(self) -> int:
        while True:
            self._prebuilt = None
            message = self.ring.receive(self._prebuild_call)
            if message.kind is MessageKind.CALL:
                self.ring.send(self._reply(message))
            elif message.kind in (MessageKind.ERROR, MessageKind.CHANGED):
                self._apply_operations_only(message)
                self.ring.send(message)
            else:
                self.ring.send(message)
                if message.kind is MessageKind.LEAVE:
                    return message.ints[0]
            del message  # it would keep its tensors while this rank waits

    def _reply(self, message: Message) -> Message:
        """The message for the next rank, or the error of this rank."""
        operands: list[torch.Tensor] = []
        self._current_step = "an operation on a cache"
        try:
            route = self._route(message)
            operands = message.tensors[: route.program.num_operands]
            return self._run_captured(route, message) or self._run(route, message)
        except Exception as error:
            own, step = self.ring.coor.peers[self.ring.coor.rank], self._current_step
            note = f"{own}: {step} raised {describe_with_traceback(error)}"
            self.ring.check_all_failed(note)
            kind = MessageKind.CHANGED if isinstance(error, StageError) else MessageKind.ERROR
            return replace(message, kind=kind, tensors=operands, note=note)

    def _run_captured(self, route: StageRoute, message: Message) -> Message | None:
        """The result of _run, by a CUDA graph; None where there is none for this message."""
        if self.graphs is None:
            return None

        def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return self._run(route, replace(message, tensors=tensors)).tensors

        self._current_step = "a CUDA graph"
        leaving = self.graphs.run(route, message, self.caches, work)
        if leaving is None:
            return None
        return replace(message, tensors=[*leaving, *message.tensors[len(route.arriving) :]])

    def _run(self, route: StageRoute, message: Message) -> Message:
        self._apply_operations(route.program, message)  # whatever fails: they are sent once
        held = self._arrived_tensors(route, message)
        beyond = message.tensors[len(route.arriving) :]
        facts = json.loads(message.note) if message.note else []
        call: StageCall | None = None
        for step, made_at, repeats, done in route.steps:
            self._current_step = step.module
            if call is not None and repeats:
                call.reuse(held[step.slots[0]])
            # The prebuilt call is of this message only if receive() returned the predicted object
            # itself: then its arguments are views of the memory that the frame was received into.
            elif call is None and self._prebuilt is not None and self._prebuilt[0] is message:
                call = self._prebuilt[1]
            else:
                call = StageCall(
                    step, [held[slot] for slot in step.slots], message.ints, self.caches
                )
            may_write = step.is_new or (
                step.output != pytree.NEW_HIDDEN_STATE and pytree.written_inputs(step.output)
            )
            inputs_before = [tensor.clone() for tensor in call.inputs] if may_write else []
            before = call.layer_versions() if step.is_new else []
            items = call.items() if step.is_new else []
            value = self.modules[step.module](*call.args, **call.kwargs)
            if step.is_new:
                call.check_items(items, step.module)
            if step.is_new and call.shared:
                self.ring.check_whole([*held_tensors(call.handed_on())], step.module)
            written = call.written(inputs_before) if may_write else []
            output = step.output
            if output is None:
                beyond = []
                output = call.describe(value, beyond, written)
            elif output == pytree.NEW_HIDDEN_STATE and not written and call.is_plain(value):
                held[made_at] = value
            else:
                held.update(enumerate(_check_output_unchanged(step, call, value, written), made_at))
            if step.is_new:
                facts.append([output, *call.cache_facts(before)])
            for slot in done:
                del held[slot]
        tensors = [held[slot] for slot in route.leaving] + beyond
        note = json.dumps(facts) if facts else ""
        return Message(MessageKind.CALL, message.program, message.ints, tensors, message.text, note)

    def _arrived_tensors(self, route: StageRoute, message: Message) -> dict[int, torch.Tensor]:
        """The tensors that have arrived, by slot."""
        arrived = message.tensors[: len(route.arriving)]
        if self.device.type != "cpu":
            arrived = [tensor.to(self.device) for tensor in arrived]
        return dict(zip(route.arriving, arrived, strict=True))

    def _prebuild_call(self, message: Message) -> None:
        """Prepare the first call of a message that is likely to come.

        Its tensors have no values yet, and caches must not change: another message may come.
        """
        route = self.routes.get(message.program) if message.kind is MessageKind.CALL else None
        if route is None or not route.steps or self.device.type != "cpu":
            return
        if route.program.operations != NOTHING:
            return
        held, step = self._arrived_tensors(route, message), route.steps[0][0]
        with contextlib.suppress(DrumlineError):  # it is free to ask for a cache that is gone
            inputs = [held[slot] for slot in step.slots]
            self._prebuilt = message, StageCall(step, inputs, message.ints, self.caches)

    def _route(self, message: Message) -> StageRoute:
        """The program of a message; its text comes with the first one."""
        if message.program not in self.routes:
            program = Program.from_json(message.text)
            self.routes[message.program] = StageRoute(program, self.ring.hop)
        return self.routes[message.program]

    def _apply_operations(self, program: Program, message: Message) -> None:
        if program.operations == NOTHING:
            return
        operands = message.tensors[: program.num_operands]
        arrived = pytree.Unflattener(iter(message.ints), operands, self.caches)
        failures = []
        for operation in pytree.unflatten(program.operations, arrived):
            try:
                if operation[0] == "scale_weight":
                    self._scale_weight(*operation[1:])
                elif operation[0] == "use_attention":
                    self._use_attention(*operation[1:])
                else:
                    self.caches.apply(*operation)
            except Exception as error:  # the others are done all the same, here as elsewhere
                failures.append(error)
        if self.graphs is not None:
            self.graphs.keep_only(self.caches.by_number)
        if failures:
            raise failures[0]

    def _scale_weight(self, serial: int, rank: int, name: str, method: str, number: float) -> None:
        """Scale it once, though an interrupted master sends again what may have been sent."""
        if rank != self.ring.hop or serial in self._scalings:
            return
        self._scalings.add(serial)
        module, _, own_name = name.rpartition(".")
        weight = getattr(self.modules[module], own_name)
        if weight.device.type != self.device.type:
            raise DrumlineError(
                f"{name} is kept on the CPU or on disk, so {method} would scale only a copy; give "
                "its layer a device in device_map."
            )
        getattr(weight, method)(number)

    def _use_attention(self, name: str) -> None:
        from drumline.contact.batching.paged_attention import register_attention

        register_attention()
        model: Any = self.modules[""]
        model.set_attn_implementation(name)

    def _apply_operations_only(self, message: Message) -> None:
        """Another stage failed: the operations on caches are still done, here as there."""
        with contextlib.suppress(Exception):  # the first is on its way to the master already
            self._apply_operations(self._route(message).program, message)


def _check_output_unchanged(
    step: StageStep, call: StageCall, value: Any, written: Sequence[int]
) -> list[torch.Tensor]:
    """The new tensors of what a layer returned, which must be of the form known for such calls."""
    new: list[torch.Tensor] = []
    usual = pytree.written_inputs(step.output)
    output = call.describe(value, new, usual if {*written} <= {*usual} else written)
    if output != step.output and not pytree.is_of_form(output, step.output):
        before = "layers like it have returned" if step.is_new else "it has returned"
        raise StageError(
            f"{step.module} returned {output} where {before} {step.output} for such arguments, so "
            "what the master went on with is wrong; call the model again, and it is asked, or run "
            "it on one rank if what it returns varies."
        )
    return new
