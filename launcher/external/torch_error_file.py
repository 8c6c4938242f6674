"""The file in which torchrun looks for the error of a rank."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Mapping


def write_error_file(environ: Mapping[str, str], error: BaseException) -> None:
    """Write error to the file in which torchrun looks for the root cause, if it has named one.

    The format is torch.distributed.elastic.multiprocessing.errors.ErrorHandler's.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w") as file:  # the error itself matters more
        json.dump({"message": message}, file)
