"""Measures how long a run waits for its data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


class DataWaits:
    """Adds up the seconds that ``next(batches)`` takes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def count(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and time each."""
        while True:
            began_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - began_s
            yield batch
