"""Guide 002's training: ``python train.py`` takes configs/stl10_config.yaml through all of its phases."""

import sys
from pathlib import Path

from fulltilt.cli import main

main(["contrastive", "--config", str(Path(__file__).parent / "configs" / "stl10_config.yaml"), *sys.argv[1:]])
