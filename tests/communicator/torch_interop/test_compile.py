"""Collectives inside compiled functions."""

import contextlib
import gc

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from communicator import Communicator, CommunicatorError, compile
from coordinator import Coordinator
from launcher import LaunchInfo


@pytest.fixture
def alone():
    with Coordinator(LaunchInfo("alone")) as coor, Communicator(coor, "gloo") as comm:
        yield comm


OPERATORS = {
    "allreduce_": ("sum",),
    "allreduce": ("sum",),
    "allgather": (-1,),
    "reduce_scatter": ("sum", 1),
    "alltoall": (),
    "sendrecv": (0, 0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_pass_the_checks_of_torch(alone, name):
    operator = getattr(torch.ops.drumline, name).default
    opcheck(operator, (torch.ones(1, 4), compile.name(alone), *OPERATORS[name]))


def test_generated_code_calls_it_in_place_on_the_product_and_copies_nothing(alone):
    group = compile.name(alone)

    def layer(x, weight):
        return compile.allreduce(x @ weight, group)

    x, weight = torch.randn(4, 8), torch.randn(8, 16)
    torch._dynamo.reset()
    found, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), x, weight)
    assert torch.allclose(found, x @ weight)
    calls = [line for line in code.splitlines() if "allreduce_.default(" in line]
    assert len(calls) == 1
    assert code.count("empty_strided_cpu(") == 1  # the product; the sum is written over it
    assert "clone" not in code and "copy_" not in code


def test_compiled_ranks_agree_with_eager_ones(ranks):
    """Each thread compiles for itself: a group's name is part of what was compiled."""

    def body(info):
        with Coordinator(info) as coor, Communicator(coor) as comm:
            group = compile.name(comm)

            @torch.compile(fullgraph=True, backend="aot_eager")
            def layer(x):
                return compile.allreduce(x * 2, group, "max") - 1

            return layer(torch.arange(4.0) * (1 - 2 * comm.rank)).tolist()

    assert ranks(body, 2) == [[-1.0, 1.0, 3.0, 5.0]] * 2


def test_compiled_collectives_in_new_tensors_are_those_of_the_communicator(ranks):
    """Of a tensor that is not contiguous, and of a second shape, for which sizes are symbols."""

    def body(info):
        with Coordinator(info) as coor, Communicator(coor) as comm:
            group, other = compile.name(comm), 1 - comm.rank

            @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
            def layer(x):
                return (
                    compile.reduced(x, group, "max"),
                    compile.allgather(x, group, -1),
                    compile.reduce_scatter(x, group, dim=-1),
                    compile.alltoall(x, group),
                    compile.sendrecv(x, group, other, other),
                )

            for columns in (2, 6):
                x = (torch.arange(2.0 * columns).view(columns, 2) * (comm.rank + 1)).t()
                plain, before = x.contiguous(), x.clone()
                expected = (
                    comm.allreduce(plain.clone(), "max"),
                    comm.allgather(plain, dim=-1),
                    comm.reduce_scatter(plain, dim=-1),
                    comm.alltoall(plain),
                    comm.allgather(plain)[other],
                )
                for result, value in zip(layer(x), expected, strict=True):
                    assert torch.equal(result, value)
                assert torch.equal(x, before)

    ranks(body, 2)


@pytest.mark.parametrize("call", ["reduced", "allgather", "reduce_scatter", "alltoall"])
def test_no_gradient_is_lost_in_a_new_tensor(alone, call):
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"needs a gradient"):
        getattr(compile, call)(x, compile.name(alone))


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_a_tensor_that_needs_a_gradient_is_refused_and_without_grad_it_goes(alone, how):
    """It used to run, and the gradient to pass by the allreduce without a word."""
    group, weight = compile.name(alone), torch.ones(3, requires_grad=True)

    def layer(x):
        return compile.allreduce(x * weight, group)

    if how != "eager":
        layer = torch.compile(layer, fullgraph=True, backend=how)
    with pytest.raises(Exception, match=r"rank 0: compile.allreduce of \(3,\).*(?s:.*)no_grad"):
        layer(torch.ones(3))
    with torch.no_grad():
        assert layer(torch.ones(3)).tolist() == [1.0] * 3


def test_what_a_gradient_needs_may_not_be_changed_by_it(alone):
    """The product keeps x for weight's gradient, which would be wrong after the sum."""
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    product = x * weight
    compile.allreduce(x, compile.name(alone))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_an_input_changed_in_place_is_seen_by_the_caller(alone):
    group = compile.name(alone)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        x.add_(1)
        compile.allreduce(x, group)

    x = torch.zeros(3)
    step(x)
    assert x.tolist() == [1.0] * 3


def test_a_communicator_has_one_name_and_is_forgotten_with_it():
    with Coordinator(LaunchInfo("alone")) as coor:
        comm = Communicator(coor, "gloo")
        group = compile.name(comm)
        assert compile.name(comm) == group
        del comm
        gc.collect()
        with pytest.raises(CommunicatorError, match="was deleted"):
            compile.allreduce(torch.ones(1), group)


@pytest.mark.parametrize("shape, dim", [((2, 3), 2), ((2, 3), -3), ((), 0)])
def test_a_wrong_dim_is_refused_by_the_compiler_as_by_the_call(ranks, shape, dim):
    """It was an IndexError about some list."""

    def body(info):
        with Coordinator(info) as coor, Communicator(coor) as comm:
            group, texts = compile.name(comm), []
            for mode in (FakeTensorMode(), contextlib.nullcontext()):
                for call in (compile.allgather, compile.reduce_scatter):
                    with mode, pytest.raises(ValueError, match=r"rank .* is none of") as raised:
                        call(torch.ones(shape), group, dim=dim)
                    texts.append(str(raised.value))
            return texts

    for texts in ranks(body, 2):
        assert texts[:2] == texts[2:]
