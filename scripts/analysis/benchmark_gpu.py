"""The GPU benchmark of the guides: ``fulltilt tune`` under its old name, varying what is named and nothing else."""

import sys

from fulltilt.cli import main

main(["tune", "--named-only", *sys.argv[1:]])
