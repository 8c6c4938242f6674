"""The steps of csrc/cuda/oneshot.cu under ThreadSanitizer: each rank at a pace of its own.

Two planted faults have to be noticed: flags that order nothing, and one buffer for all calls.
"""

import subprocess

import pytest

from tests.cases import soak
from tests.communicator.backends.nccl import oneshot_build

WORLDS = [2, 4, soak(8)]
CLEAN, RACE = 0, 66  # exit codes of ThreadSanitizer; 1 is a wrong sum

DRIVER = """
#include <cstdio>

constexpr int TURNS = 16, COUNT = 96;
static float in[8][TURNS][COUNT], out[8][TURNS][COUNT];

static void run(int rank, int world, void* const* arenas, std::atomic<int>* refused) {
    oneshot_state* state;
    oneshot_state_create(&state);
    for (int turn = 0; turn < TURNS; ++turn) {
        oneshot_call call = {sizeof call, turn % 3 == 0 ? ONESHOT_TWO : ONESHOT_ONE,
                             ONESHOT_FLOAT32, world, rank, 1, 1 + turn % 3, sizeof in[0][0]};
        call.timeout_ns = 600'000'000'000;
        call.in[rank] = in[rank][turn];
        call.out[rank] = out[rank][turn];
        std::memcpy(call.arena, arenas, sizeof call.arena);
        call.state = state;
        *refused += oneshot_launch(&call) != 0;
    }
    *refused += oneshot_state_problem(state) != 0;
    oneshot_state_destroy(state);
}

int main(int, char** arguments) {
    int world = std::atoi(arguments[1]);
    planted = static_cast<Planted>(std::atoi(arguments[2]));
    void* arenas[8] = {};
    std::atomic<int> wrong{0};
    for (int rank = 0; rank < world; ++rank) {
        oneshot_create(&arenas[rank]);
        oneshot_reset(arenas[rank], 0xff);  // the numbers wrap in between
        for (int turn = 0; turn < TURNS; ++turn)
            for (int i = 0; i < COUNT; ++i) in[rank][turn][i] = (rank + 1) * (turn * COUNT + i);
    }
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world; ++rank) ranks.emplace_back(run, rank, world, arenas, &wrong);
    for (std::thread& rank : ranks) rank.join();
    for (int rank = 0; rank < world; ++rank)
        for (int turn = 0; turn < TURNS; ++turn)
            for (int i = 0; i < COUNT; ++i)
                wrong += out[rank][turn][i] != (turn * COUNT + i) * world * (world + 1) / 2;
    std::printf("%d wrong\\n", wrong.load());
    return wrong != 0;
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(world, fault): exit code and output of the ranks under ThreadSanitizer."""
    source = oneshot_build.replace(oneshot_build.source_for_cpu(), oneshot_build.PLANTED)
    faults = "enum Planted { NOTHING, RELAXED_FLAGS, ONE_BUFFER };\nstatic Planted planted;\n"
    program = oneshot_build.compile_source(
        faults + source + DRIVER, tmp_path_factory.mktemp("races") / "races", "-fsanitize=thread"
    )

    # With as many random bits in addresses as some kernels use, ThreadSanitizer does not start.
    fixed_addresses = ["setarch", "-R"]
    may_fix = subprocess.run([*fixed_addresses, "true"], capture_output=True).returncode == 0

    def run(world, fault):
        done = subprocess.run(
            [*(fixed_addresses if may_fix else []), program, str(world), str(fault)],
            capture_output=True,
            text=True,
            timeout=250,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_at_their_own_pace_do_not_race(run, world):
    code, output = run(world, 0)
    assert code == CLEAN, output[-4000:]


def test_flags_that_order_nothing_are_noticed(run):
    code, output = run(4, 1)
    assert code == RACE and "data race" in output


def test_a_single_staging_buffer_is_noticed(run):
    code, output = run(4, 2)
    assert code in (1, RACE) and ("data race" in output or " 0 wrong" not in output)
