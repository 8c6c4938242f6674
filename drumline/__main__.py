"""python -m drumline plan | generate | bench | serve | run"""

import sys

from drumline.cli import main

sys.exit(main(sys.argv[1:]))
