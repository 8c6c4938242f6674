"""Does a backend keep its promises? One rank of the answer.

drumline run -n 3 check.py ./libtoy.so [CASES]
"""

import sys

from communicator import Communicator, conformance
from coordinator import Coordinator

with Coordinator() as coor, Communicator(coor, backend=sys.argv[1]) as comm:
    report = conformance.check(comm, only="".join(sys.argv[2:]))
    if coor.is_master():
        print(report)
    report.raise_if_failed()
