"""Loops over weights in few bits. Memory is given by address; nothing about it is checked."""

Result = tuple[int, int, int, bool, int, int]
"""num_rows, num_columns, out, is_bfloat16, inputs, num_inputs: csrc/packed/packed_weights.h."""

def unpack_rows(weight: tuple[int, int, int, int], result: Result, num_threads: int, /) -> None: ...
def unpack_integers(
    weight: tuple[int, int, int, int, int, int, bool, bytes, int],
    result: Result,
    num_threads: int,
    /,
) -> None: ...
