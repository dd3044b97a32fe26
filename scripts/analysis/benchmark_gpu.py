"""The GPU benchmark of the guides: ``fulltilt tune`` under its old name and with its flags."""

import sys

from fulltilt.cli import main

main(["tune", *sys.argv[1:]])
