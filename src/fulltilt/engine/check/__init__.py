"""The dry run and the checklist of `fulltilt check`."""
