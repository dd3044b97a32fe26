"""Derive seeds for augmentation from the run's seed, the epoch and the samples alone.

The order of batches, the number of workers and a resume in the middle of an epoch then change no augmented batch.
"""

_MASK = (1 << 64) - 1


def compute_seed(*parts: int) -> int:
    """Mix whole numbers into one seed in [0, 2**63).

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
