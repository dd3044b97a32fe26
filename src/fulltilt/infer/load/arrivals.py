"""Plan when requests arrive, as the four scenarios of MLPerf's LoadGen have it, and how long prompts are.

Source: MLCommons, MLPerf inference rules, Scenarios (2026).
"""

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np

Scenario = Literal["server", "single", "multi", "offline"]
SAMPLES_PER_REQUEST = {"single": 1, "multi": 8}  # unless it is stated
PROMPT_SHARES = (0.125, 0.5)  # of a sample that a prompt has, from … to
MIN_REQUESTS = 100  # for a mean, a maximum and a median, which need no bound from the order, or nearly none


def plan_arrivals(
    scenario: Scenario, n_requests: int, requests_per_s: float | None, *, seed: int
) -> Sequence[float | None]:
    """Plan arrival times; None stands for as soon as the request before is answered."""
    if scenario == "server":  # a Poisson process: independent, exponential gaps
        assert requests_per_s is not None
        return np.cumsum(np.random.default_rng(seed).exponential(1 / requests_per_s, n_requests)).tolist()
    return [0.0 if scenario == "offline" else None] * n_requests


def cut_prompt(words: Sequence[int], draws: random.Random) -> Sequence[int]:
    """Cut the beginning of a sample that a model is to write on from."""
    low, high = (max(1, int(share * len(words))) for share in PROMPT_SHARES)
    return words[: draws.randint(low, high)]
