"""Run guide 004's training: ``fulltilt train`` with its flags, and the guide's metrics files.

They lie in ``results/metrics``, as the guide has it; with ``--out DIR`` in ``DIR/metrics``.
"""

import argparse
import os
import sys

from fulltilt.cli import main

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--out", default="results")
metrics = os.path.join(parser.parse_known_args()[0].out, "metrics")
main(["train", "--metrics", metrics, *sys.argv[1:]])
