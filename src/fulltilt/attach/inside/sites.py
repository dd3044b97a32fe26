"""``Sites``: adds up what each line of user code cost, over all plain steps."""

from __future__ import annotations

import os


class Site:
    """One line of user code and what it does: the method it calls, or the file it writes."""

    __slots__ = ("does", "file", "line", "n_calls", "n_steps", "new_calls", "new_ns", "ns", "where")

    def __init__(self, file, line, does, where):
        self.file, self.line, self.does, self.where = file, line, does, where
        self.n_calls = self.ns = self.n_steps = 0
        self.new_calls = self.new_ns = 0  # of the current step

    def add(self, ns):
        self.new_calls += 1
        self.new_ns += ns


class Sites:
    """Sites of one kind, by code object and line."""

    def __init__(self, kind):
        self.kind = kind
        self._found = {}

    def find(self, frame, does, where=None):
        """Return the site of the line that ``frame`` runs; ``where`` is the device, or the path of the file."""
        key = (frame.f_code, frame.f_lineno, does)
        site = self._found.get(key)
        if site is None:
            site = Site(os.path.abspath(frame.f_code.co_filename), frame.f_lineno, does, where)
            self._found[key] = site
        elif site.where != where:
            site.where = None  # the line writes one file after another
        return site

    def list(self):
        return [
            {
                "kind": self.kind,
                "file": site.file,
                "line": site.line,
                "does": site.does,
                "where": site.where,
                "n_calls": site.n_calls,
                "n_steps": site.n_steps,
                "ns": site.ns,
            }
            for site in self._found.values()
            if site.n_calls
        ]

    def end_step(self, counts):
        """Add the costs since the last step, or forget them: those of an evaluation are not part of a plain step."""
        for site in self._found.values():
            if counts and site.new_calls:
                site.n_calls += site.new_calls
                site.ns += site.new_ns
                site.n_steps += 1
            site.new_calls = site.new_ns = 0
        if not counts:
            self._found = {key: site for key, site in self._found.items() if site.n_calls}
