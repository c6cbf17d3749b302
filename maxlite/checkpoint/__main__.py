"""`python -m maxlite.checkpoint list|show|verify|diff|prune`: looking after the checkpoints of a run by hand."""

import sys

from maxlite.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
