"""Products on a CPU. Memory is given by address; nothing about it is checked."""

def multiply_rows(
    is_bfloat16: bool,
    weight: int,
    numbers: tuple[int, ...],
    x: int,
    bias: int,
    out: int,
    num_rows: int,
    num_columns: int,
    num_threads: int,
    /,
) -> None:
    """out = weight[numbers] x + bias, as csrc/products/single_rows.h has it. bias: 0 for none."""
