"""A guard that forgets deadlines: with it, what checks that no attempt outlives its lease has to fail."""

import math
import sys

from fulltilt.lab.runner import guard, renewal

guard.Deadline.read = lambda self: math.inf
renewal.Renewal._confirm = lambda self, sent_s: None  # the runner does not end by itself either
sys.exit(guard.main())
