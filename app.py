"""Guide 000's lab: ``python app.py`` serves one, ``--server-only`` without devices, ``--client-only --url U`` joins."""

import sys

from fulltilt.cli import main

MODES = {"--server-only": ["serve", "--devices", "none"], "--client-only": ["work"]}

mode = next((word for word in sys.argv[1:] if word in MODES), "")
main(["lab", *MODES.get(mode, ["serve"]), *(word for word in sys.argv[1:] if word != mode)])
