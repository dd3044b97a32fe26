"""Run ``fulltilt train`` with its flags, under the name that the guides use."""

import sys

from fulltilt.cli import main

main(["train", *sys.argv[1:]])
