"""Renew the lease of an attempt in a thread of its own, which no upload delays."""

import os
import random
import threading
import time
from typing import Any

from fulltilt.lab.runner.guard import Deadline, read_clock_s
from fulltilt.lab.runner.link import FencedError, Link, UnreachableError
from fulltilt.lab.runner.order import Order

RETRY_S = 1.0
SPREAD = (0.8, 1.2)  # else all that a server's start has set to the same beat would stay in it


class Renewal:
    """Renews the lease until it is told to stop, or fenced.

    Attributes:
        wish: What somebody wants of the attempt: cancel, pause; None: that it goes on.
        is_fenced: The server says that the attempt is not ours any more.
        ends_s: When the training has to save and end, by ``read_clock_s``.
    """

    def __init__(self, link: Link, order: Order, deadline: Deadline):
        self._link, self._order, self._deadline = link, order, deadline
        self.wish: str | None = None
        self.is_fenced = False
        self.ends_s = float("inf")
        self._is_over = threading.Event()

    def begin(self) -> dict[str, Any]:
        """Ask what to do, as long as the guard lets us, and start renewing.

        Raises:
            FencedError: the attempt is not ours any more.
        """
        while True:
            sent_s = read_clock_s()
            try:
                self._task = self._link.greet(pid=os.getpid())
                break
            except UnreachableError:
                time.sleep(RETRY_S)
        self._confirm(sent_s)
        threading.Thread(target=self._run, daemon=True, name="renewal").start()
        return self._task

    def stop(self) -> None:
        self._is_over.set()

    def _run(self) -> None:
        link = Link(self._order)
        while not self._is_over.is_set():
            wait_s = self._task["wait_s"] * random.uniform(*SPREAD)
            sent_s = read_clock_s()
            try:
                wish = link.renew(wait_s=0.0 if self.wish else wait_s)
                self.wish = wish or self.wish
                self._confirm(sent_s)
            except UnreachableError:
                wish = None
            except FencedError:
                self.is_fenced = not self._is_over.is_set()
                return
            if wish or read_clock_s() - sent_s < wait_s / 2:
                self._is_over.wait(min(RETRY_S, wait_s))

    def _confirm(self, sent_s: float) -> None:
        """Move the time until which we may live: measured from when a confirmed renewal was sent."""
        self.ends_s = sent_s + self._task["end_after_s"]
        self._deadline.move(self.ends_s + self._task["grace_s"])
