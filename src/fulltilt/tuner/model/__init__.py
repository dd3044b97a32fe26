"""What is known so far → predicted seconds and GiB for any plan. Pure numpy: no torch, no I/O."""
