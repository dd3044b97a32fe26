"""Run guide 004's training: ``fulltilt train`` with its flags, and the guide's metrics files in ``results/metrics``."""

import sys

from fulltilt.cli import main

main(["train", "--metrics", "results/metrics", *sys.argv[1:]])
