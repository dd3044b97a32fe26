"""``Blocks``: decides which steps run with the tested line of code and which without it."""

from __future__ import annotations

import random

PRESENT, REMOVED, PRESENT_AGAIN = 0, 1, 2
N_SETTLING, N_TIMED = 1, 3  # steps of a block: the first, after a switch of arms, is not timed
N_WARM_UP = 5  # uncounted first steps of a run, in which caches and allocators settle
MAX_ROUNDS = 60
A_A_EVERY = 3  # one round in so many is A/A: the present line against itself


class Blocks:
    """Plans rounds of four blocks of steps, ABBA or BAAB at random, so that linear drift cancels in each round.

    A block begins only if it and one more step fit into the epoch; a block cut short by an epoch's end is run again.
    The order comes from a generator of its own, so the script's random numbers are not touched.

    Attributes:
        round: Number of the current round; 0: none yet.
        block: Number of the current block; 0: the step belongs to none.
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
        """Choose arm, round and block of the step that begins.

        Args:
            is_broken: An epoch ended in the previous step.
            n_steps_left: Steps left in the epoch; None: unknown.
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
        """Begin the next block and return True, unless the comparison is over or the epoch too short."""
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
