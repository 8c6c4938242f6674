"""torch's own tests of torch.distributed, from the installed wheel, with gloo replaced.

    python torch_tests.py drumline 2 FOLDER [part of a test's name]

leaves FOLDER/outcomes.json: by test "passed", "skipped: " and torch's reason, or what went wrong on
each rank. The decorators of the tests decide by the name of the backend, so it stays gloo for them
and is replaced where a group is made. The same ranks run one test after the other, each in a group
of its own; after a failure others are forked.
"""

import json
import multiprocessing
import os
import signal
import sys
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import communicator.torch_interop.process_group  # noqa: F401

BACKEND, WORLD, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
GROUP_TIMEOUT_S, TEST_TIMEOUT_S = 20, 60
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
sys.modules.setdefault(  # of which torch's tests take no more than this, here
    "expecttest", types.SimpleNamespace(TestCase=unittest.TestCase)
)

from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if WORLD > 2:
    os.environ["BACKEND"] = "mpi"  # of all others torch asks eight ranks for groups of some ranks

RESERVED = dict.fromkeys(
    (
        "test_get_backend",
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "torch reserves this to gloo by name",
) | {"test_ddp_logging_data_cpu": "in C++ torch names all backends of others 'custom'"}
REASONS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class TorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The tests of torch, whose ranks meet at a barrier of this program."""

    def __init__(self, name, rank, meet):
        super().__init__(name)
        self.rank, self._barrier = rank, meet


def replace_gloo():
    """Have groups that are asked of gloo made by the backend under test."""
    for name in ("init_process_group", "new_group"):
        make = on_backend(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, make)


def on_backend(make):
    def made(*arguments, **options):
        if options.get("backend") == "gloo":
            options["backend"] = BACKEND
        return make(*arguments, **options)

    return made


def run_in_group(name, rank, barrier):
    def meet(*_, **__):
        barrier.wait(TEST_TIMEOUT_S)

    prepare(name)
    limit = distributed_test.CUSTOM_PG_TIMEOUT.get(name, GROUP_TIMEOUT_S)
    dist.init_process_group(
        backend="gloo",
        init_method=f"file://{FOLDER / name}.store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=limit),
    )
    getattr(TorchTests(name, rank, meet), name)()
    meet()


def prepare(name):
    """Put right what a test before this one has set."""
    torch.manual_seed(0)
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    dist.set_debug_level_from_env()
    (FOLDER / name / "test_dir").mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(FOLDER / name)


def outcome_of(call, *arguments):
    try:
        call(*arguments)
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {REASONS[end.code]}"
    except BaseException:
        return traceback.format_exc()
    return "passed"


def run_rank(names, rank, barrier):
    """Run the tests until one fails; FOLDER/<name>.<rank> is the outcome of each."""
    with open(FOLDER / f"rank{rank}.log", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    for name in names:
        file = FOLDER / f"{name}.{rank}"
        file.write_text(f"no end within {TEST_TIMEOUT_S} s")
        signal.alarm(TEST_TIMEOUT_S)
        outcome = outcome_of(run_in_group, name, rank, barrier)
        file.write_text(outcome)
        if not is_good(outcome):
            return barrier.abort()
        dist.destroy_process_group()


def is_good(outcome):
    return outcome.startswith(("passed", "skipped"))


def probe(names):
    """Write down which tests end before they have to do with any group."""
    outcomes = {name: outcome_of(getattr(TorchTests(name, 0, None), name)) for name in names}
    (FOLDER / "probed.json").write_text(json.dumps(outcomes))


def forked(call, *arguments):
    """The pid of a process that makes the call."""
    pid = os.fork()
    if pid:
        return pid
    try:
        call(*arguments)
    finally:
        os._exit(0)


def skips(names):
    """The outcomes of tests that torch skips without a group. What it leaves to MPI is run."""
    reasons = {
        name: getattr(getattr(TorchTests, name), "__unittest_skip_why__", "") for name in names
    } | RESERVED
    found = {
        name: f"skipped: {reasons[name]}"
        for name in names
        if reasons[name] and not reasons[name].startswith("Only MPI supports")
    }
    os.waitpid(forked(probe, [name for name in names if name not in found]), 0)
    probed = json.loads((FOLDER / "probed.json").read_text())
    return found | {name: why for name, why in probed.items() if why.startswith("skipped")}


def run(names):
    """Outcomes by name."""
    outcomes = {}
    while len(outcomes) < len(names):
        left = names[len(outcomes) :]
        barrier = multiprocessing.get_context("fork").Barrier(WORLD)
        pids = [forked(run_rank, left, rank, barrier) for rank in range(WORLD)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        files = {name: sorted(FOLDER.glob(f"{name}.[0-9]")) for name in left}
        for name, of_ranks in files.items():
            if of_ranks:
                outcomes[name] = together([file.read_text() for file in of_ranks], codes)
    return outcomes


def together(outcomes, codes):
    if all(map(is_good, outcomes)):
        return outcomes[0]
    return f"exit codes {codes}\n" + "\n".join(outcomes)


def main(part=""):
    replace_gloo()
    names = unittest.TestLoader().getTestCaseNames(TorchTests)
    names = [name for name in names if part in name]
    skipped = skips(names)
    outcomes = skipped | run([name for name in names if name not in skipped])
    (FOLDER / "outcomes.json").write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main(*sys.argv[4:])
