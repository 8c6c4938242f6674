"""A rank that holds layers and runs them for the master."""

from __future__ import annotations

import json
import os
import socket
import traceback
from typing import Any

import torch
from torch import nn

from inference.errors import InferenceError
from inference.frames import Kind, Message
from inference.program import Program, Step
from inference.ring import Ring
from inference.values import Arrived, changes, describe, unflatten
from inference.vault import Vault

Held = dict[int, torch.Tensor]


class Stage:
    """Runs its steps of each program that passes, and hands the rest on."""

    def __init__(self, model: Any, ring: Ring, device: torch.device):
        self.ring, self.rank, self.device = ring, ring.rank, device
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.vault = Vault(model.config)
        self.programs: dict[int, Program] = {}

    def serve(self) -> int:
        """Until the master leaves; its exit code. Raises PeerLost if a neighbour dies instead."""
        while True:
            message = self.ring.receive()
            if message.kind is Kind.CALL:
                self.ring.send(self._reply(message))
            elif message.kind is Kind.ERROR:
                self._keep_in_step(message)
                self.ring.send(message)
            else:
                self.ring.send(message)
                return message.ints[0]

    def _reply(self, message: Message) -> Message:
        """The message for the next rank, or the story of what went wrong here."""
        operands: list[torch.Tensor] = []
        doing = ["an operation on a cache"]
        try:
            with torch.inference_mode():
                program = self._program(message)
                operands = message.tensors[: program.num_operands]
                return self._run(program, message, doing)
        except Exception as error:
            failed = Message(Kind.ERROR, message.program, message.ints, operands, message.text)
            failed.note = self._story(error, doing[0])
            return failed

    def _run(self, program: Program, message: Message, doing: list[str]) -> Message:
        arriving = program.leaving(self.rank - 1)
        arrived = [tensor.to(self.device) for tensor in message.tensors[: len(arriving)]]
        held = dict(zip(arriving, arrived, strict=True))
        beyond, note = message.tensors[len(arriving) :], message.note
        self._operate(program, message)
        for number, step in enumerate(program.steps):
            if step.rank == self.rank:
                doing[0] = step.module
                new, output = self._step(step, message.ints, held)
                if step.output is None:
                    beyond, note = new, output
                else:
                    held.update(enumerate(new, program.outputs_at[number]))
        tensors = [*[held[slot] for slot in program.leaving(self.rank)], *beyond]
        return Message(Kind.CALL, message.program, message.ints, tensors, message.text, note)

    def _program(self, message: Message) -> Program:
        """The program of a message; its text comes with the first one."""
        if message.program not in self.programs:
            self.programs[message.program] = Program.from_json(message.text)
        return self.programs[message.program]

    def _operate(self, program: Program, message: Message) -> None:
        operands = message.tensors[: program.num_operands]
        arrived = Arrived(iter(message.ints), operands, self.vault)
        for operation in unflatten(program.operations, arrived):
            self.vault.apply(*operation)

    def _step(self, step: Step, ints: list[int], held: Held) -> tuple[list[torch.Tensor], str]:
        """Call one layer: the new tensors it returned, and the description of its output."""
        inputs = [held[slot] for slot in step.slots]
        arrived = Arrived(iter(ints[step.ints_at :]), inputs, self.vault)
        args, kwargs = unflatten(step.arguments, arrived)
        before = [dict(shared) for shared in arrived.shared]
        value = self.modules[step.module](*args, **kwargs)
        written = [changes(old, now) for old, now in zip(before, arrived.shared, strict=True)]
        new: list[torch.Tensor] = []
        output = describe([value, *written], inputs, new)
        if step.output is not None and output != step.output:
            raise InferenceError(
                f"{step.module} returned {output} where it returned {step.output} for such "
                "arguments before, so what the master went on with is wrong; run this model on "
                "one rank."
            )
        return new, json.dumps(output)

    def _keep_in_step(self, message: Message) -> None:
        """Another stage failed: the operations on caches are still done, here as there."""
        try:
            self._operate(self._program(message), message)
        except InferenceError:
            pass  # the first error is on its way to the master already

    def _story(self, error: Exception, doing: str) -> str:
        trace = "".join(traceback.format_exception(error))
        return (
            f"rank {self.rank} ({socket.gethostname()}, pid {os.getpid()}): {doing} raised "
            f"{type(error).__name__}: {error}\nThe traceback over there:\n{trace}"
        )
