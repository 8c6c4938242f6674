"""python -m inference plan | generate | bench | serve | run"""

import sys

from inference.cli import main

sys.exit(main(sys.argv[1:]))
