"""``Blocks``: which steps run with the site under test, and which without it."""

from __future__ import annotations

import random

PRESENT, REMOVED, PRESENT_AGAIN = 0, 1, 2
N_SETTLING, N_TIMED = 1, 3  # steps of a block: what follows a switch is not timed
MAX_ROUNDS = 60
A_A_EVERY = 3  # of so many rounds one compares the present site with itself


class Blocks:
    """Rounds of four blocks, ABBA or BAAB by lot, so that a linear drift cancels within each.

    A block begins only where it and one more step fit into the epoch; one that an epoch's end broke off is run again.
    The lot is drawn by a generator of our own: the script's is not touched.

    Attributes:
        round: Number of the round that the current step belongs to; 0: none yet.
        block: Number of its block; 0: the step belongs to none.
    """

    def __init__(self):
        self._random = random.Random()
        self._arms, self._steps_left, self._n_blocks = [], 0, 0
        self.round = self.block = 0
        self.arm, self.is_timed = PRESENT, False
        self.was_started = self._is_running = False

    def start(self):
        self.was_started = self._is_running = True

    def stop(self):
        self._is_running = False
        self.arm, self.is_timed, self.block = PRESENT, False, 0

    def plan_step(self, is_broken, n_steps_left=None):
        """Choose arm and place of the step that begins.

        Args:
            is_broken: An epoch ended in the step before.
            n_steps_left: In the epoch; None: unknown.
        """
        if not self._is_running:
            return
        if is_broken and self.block:
            self._arms.append(self.arm)
            self._steps_left = 0
        if not self._steps_left and not self._begin_block(n_steps_left):
            self.arm, self.is_timed, self.block = PRESENT, False, 0
            return
        self.is_timed = self._steps_left <= N_TIMED
        self._steps_left -= 1

    def _begin_block(self, n_steps_left):
        """False where none begins: the comparison is over, or too little is left of the epoch."""
        if not self._arms and self.round >= MAX_ROUNDS:
            self._is_running = False
            return False
        if n_steps_left is not None and n_steps_left <= N_SETTLING + N_TIMED:
            return False
        if not self._arms:
            self.round += 1
            other = PRESENT_AGAIN if self.round % A_A_EVERY == 0 else REMOVED
            first, second = self._random.sample((PRESENT, other), 2)
            self._arms = [first, second, second, first]
        self._n_blocks += 1
        self.block, self.arm, self._steps_left = self._n_blocks, self._arms.pop(), N_SETTLING + N_TIMED
        return True
