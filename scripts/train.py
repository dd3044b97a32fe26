"""Training under the guides' name: ``fulltilt train`` with its flags."""

import sys

from fulltilt.cli import main

main(["train", *sys.argv[1:]])
