"""Frames of libraries are counted; those of the program, and where it was raised, are shown."""

import json
import traceback

from launcher.cli.fold_traceback import INSTALLED, fold


def formatted(work):
    try:
        work()
    except Exception as error:
        return "".join(traceback.format_exception(error))


def test_frames_of_a_library_are_counted_and_the_last_is_shown():
    text = formatted(lambda: json.loads("{"))
    folded = fold(f"before\n{text}after\n")
    assert folded.startswith("before\nTraceback (most recent call last):\n")
    assert "... 2 frames of python\n" in folded
    assert "in raw_decode" in folded and "json.decoder.JSONDecodeError: Expecting" in folded
    assert folded.endswith("\nafter\n") and "test_fold_traceback.py" in folded


FRAMES = f"""Traceback (most recent call last):
  File "train.py", line 8, in <module>
    work(coor)
  File "{INSTALLED}/coordinator/collectives.py", line 72, in barrier
    self._exchange("barrier", Exchange(b""), timeout_s)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{INSTALLED}/coordinator/coordinator.py", line 546, in _exchange
    return self._exchange_alone(self._call, exchange)
  File "/x/site-packages/torch/nn/module.py", line 1, in forward
  [Previous line repeated 7 more times]
  File "{INSTALLED}/coordinator/failure/detector.py", line 99, in check_group
    raise self._error(failure, pending)
coordinator.errors.PeerLost: rank 0 waited
"""


def test_our_own_frames_are_counted_even_where_the_error_was_raised():
    assert (
        fold(FRAMES)
        == """Traceback (most recent call last):
  File "train.py", line 8, in <module>
    work(coor)
  ... 2 frames of drumline
  ... 1 frame of torch
  ... 1 frame of drumline
coordinator.errors.PeerLost: rank 0 waited
"""
    )


def test_text_without_a_traceback_stays():
    text = 'rank 1 (local rank 1) raised\n  File "a" is missing\n'
    assert fold(text) == text


def cause(file, error):
    frame = f'  File "{file}", line 7, in work\n    work()\n'
    link = "The above exception was the direct cause of the following exception:"
    return f"Traceback (most recent call last):\n{frame}{error}\n\n{link}\n\n"


def test_of_a_chain_of_our_own_errors_the_first_and_the_last_are_shown():
    ours = f"{INSTALLED}/communicator/backends/tcp.py"
    causes = [cause(ours, f"Error{number}: text") for number in range(4)]
    program = cause("train.py", "ValueError: of the program")
    folded = fold("".join(["rank 1 raised\n\n", *causes[:3], program, causes[3], FRAMES]))
    assert [word for word in folded.split() if word.startswith("Error")] == ["Error0:"]
    assert "ValueError: of the program" in folded and folded.endswith("PeerLost: rank 0 waited\n")
    assert folded.startswith("rank 1 raised\n\nTraceback") and folded.count("direct cause") == 2
