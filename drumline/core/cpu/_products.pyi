"""Products on a CPU. Memory is given by address; nothing about it is checked."""

def multiply_row(
    is_bfloat16: bool,
    weight: int,
    x: int,
    bias: int,
    out: int,
    num_rows: int,
    num_columns: int,
    num_threads: int,
    /,
) -> None:
    """out = weight x + bias, as csrc/products/one_row.h has it. bias: 0 for none."""
