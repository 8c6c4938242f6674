"""python -m inference plan | generate | run"""

import sys

from inference.cli import main

sys.exit(main(sys.argv[1:]))
