"""``Blocks``: which steps run with the site under test, and which without it."""

from __future__ import annotations

import random

PRESENT, REMOVED, PRESENT_AGAIN = 0, 1, 2
N_SETTLING, N_TIMED = 1, 3  # steps of a block: what follows a switch is not timed
MAX_ROUNDS = 60
A_A_EVERY = 3  # of so many rounds one compares the present site with itself


class Blocks:
    """Rounds of four blocks, ABBA or BAAB by lot, so that a linear drift cancels within each.

    A block in which an epoch ended is run again. The lot is a generator's of our own: the script's is not touched.
    """

    def __init__(self):
        self._random = random.Random()
        self._arms, self._left = [], 0
        self.round = self.block = 0  # 0: no test goes on
        self.arm, self.is_timed = PRESENT, False
        self.was_started = self._is_running = False

    def start(self):
        self.was_started = self._is_running = True

    def plan_step(self, is_broken):
        """Choose arm and place of the step that begins; ``is_broken``: an epoch ended in the one before."""
        if not self._is_running:
            return
        if not self._left and not self._arms and not is_broken and self.round >= MAX_ROUNDS:
            self.round = self.block = 0
            self.arm, self.is_timed, self._is_running = PRESENT, False, False
            return
        if is_broken and self.block:
            self._begin_block(self.arm)
        elif not self._left:
            if not self._arms:
                self._begin_round()
            self._begin_block(self._arms.pop())
        self.is_timed = self._left <= N_TIMED
        self._left -= 1

    def _begin_round(self):
        self.round += 1
        other = PRESENT_AGAIN if self.round % A_A_EVERY == 0 else REMOVED
        first, second = self._random.sample((PRESENT, other), 2)
        self._arms = [first, second, second, first]

    def _begin_block(self, arm):
        self.block += 1
        self.arm, self._left = arm, N_SETTLING + N_TIMED
