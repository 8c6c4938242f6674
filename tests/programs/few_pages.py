"""`drumline serve -n 2 --restarts 1000` with pages for few tokens, so that sequences are put back.

python -m tests.programs.few_pages CHECKPOINT
"""

import sys

import launcher
from drumline.pipeline.paged_generation import BatchedRanks
from drumline.serving.front import rank_worker
from drumline.serving.front.front_server import serve_with_restarts

NUM_PAGES = 14  # of a batch; the longest request of the tests fills eleven


def serve_front(*arguments):
    BatchedRanks.num_blocks = lambda *_: NUM_PAGES
    rank_worker.serve_front(*arguments)


if __name__ == "__main__":
    ranks = launcher.Target("function", "tests.programs.few_pages:serve_front")
    serve_with_restarts(1000, launcher.Job(ranks, (0,), 2), sys.argv[1], port=0, max_length=400)
