"""Divide the host time of a step among kinds of work (``Spans``), so that no nanosecond counts twice."""

from __future__ import annotations

from time import perf_counter_ns

KINDS = ("data_wait", "forward", "backward", "optimizer", "host_sync", "file_write")
DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, HOST_SYNC, FILE_WRITE = range(len(KINDS))


class Spans:
    """Adds up time spans by kind of work. A nested span's time counts for it alone, not for the span around it."""

    def __init__(self):
        self.totals_ns = [0] * len(KINDS)
        self.n_entered = 0
        self._open = []  # [kind, start_ns, ns of nested spans that have ended]

    def enter(self, kind):
        self.n_entered += 1
        self._open.append([kind, perf_counter_ns(), 0])

    def leave(self):
        """End the innermost span and return its duration in ns, nested spans included."""
        kind, start_ns, inner_ns = self._open.pop()
        took_ns = perf_counter_ns() - start_ns
        self.totals_ns[kind] += took_ns - inner_ns
        if self._open:
            self._open[-1][2] += took_ns
        return took_ns

    def is_inside(self, kind):
        return any(entry[0] == kind for entry in self._open)

    def leave_out(self, ns):
        """Subtract ``ns`` of the observer's own work from the open spans."""
        for entry in self._open:
            entry[1] += ns

    def cut(self, now_ns):
        """Return the totals by kind and reset them; open spans continue in the next step."""
        open_inside_ns = 0
        for entry in reversed(self._open):
            elapsed_ns = now_ns - entry[1]
            self.totals_ns[entry[0]] += elapsed_ns - entry[2] - open_inside_ns
            open_inside_ns = elapsed_ns
        totals_ns, self.totals_ns = self.totals_ns, [0] * len(KINDS)
        return totals_ns

    def go_on(self, now_ns):
        """Restart the open spans now: the time since ``cut`` belongs to the observer."""
        for entry in self._open:
            entry[1], entry[2] = now_ns, 0
