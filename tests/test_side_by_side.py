"""How the tests are shared out."""

import textwrap


def test_files_that_another_process_took_leave_nothing_set_up(warm, tmp_path):
    """The first test of a folder failed, and was run again: the folder before was still set up, if
    the last file of that was another process's."""
    for name in ("one/test_ours", "one/test_theirs", "two/test_ours_too"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("def test_nothing():\n    pass\n")
    script = """
        import sys
        from pathlib import Path
        import pytest
        from tests.programs.side_by_side import QUIETLY, Share

        folder = Path(sys.argv[1])
        taken = folder / "taken"
        taken.mkdir()
        share = Share(taken)
        share._take(folder / "one/test_theirs.py")
        options = ["-c", "/dev/null", "--rootdir", str(folder), "--import-mode=importlib"]
        sys.exit(pytest.main([*QUIETLY, *options, str(folder)], plugins=[share]))
    """
    found = warm.run("-c", textwrap.dedent(script), tmp_path)
    assert found.returncode == 0 and "2 passed" in found.stdout, found.stdout + found.stderr


def test_a_process_that_a_signal_ends_is_told_of(warm):
    """With SIGHUP its code was that of tests that fail, without a word of which."""
    script = """
        import os, signal
        from tests.programs.side_by_side import Processes

        processes, pid = Processes(1), os.fork()
        if not pid:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
            os.kill(os.getpid(), signal.SIGHUP)
        processes._end([pid])
    """
    done = warm.run("-c", textwrap.dedent(script))
    sentence = "process 0 of the tests was ended by signal 1"
    assert done.returncode == 1 and sentence in done.stdout, done.stdout + done.stderr
