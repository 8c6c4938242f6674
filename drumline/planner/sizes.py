"""Sizes of memory as users write them; `drumline plan` reads them before it knows its packages.

nbytes("2GiB")    # 2147483648
"""

from __future__ import annotations

import re

from drumline.errors import PlanError

SIZE = re.compile(r"\s*(\d{1,18}\.?\d{0,18})\s*([KMGTP]?)(i?)(B?)\s*", re.IGNORECASE)
MAX_NBYTES = 1 << 63


def nbytes(size: int | str) -> int:
    """2 GiB as a number, from a number or "2GiB" (1024) or "2GB" (1000).

    "16Gb" is as many bits, as for Accelerate.
    """
    if isinstance(size, int) and not isinstance(size, bool) and 0 <= size < MAX_NBYTES:
        return size
    match = isinstance(size, str) and SIZE.fullmatch(size)
    if not match:
        raise PlanError(f'{size!r:.99} is not a size; write bytes or "2GiB".')
    number, prefix, binary, unit = match.groups()
    factor = (1024 if binary else 1000) ** " KMGTP".index(prefix.upper() or " ")
    is_in_bits = prefix and unit == "b" and not binary
    return int(float(number) * factor) // (8 if is_in_bits else 1)
