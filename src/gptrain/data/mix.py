"""One 64-bit mixing function: all randomness of this room is a pure function of integers.

NumPy's own generators are stateful and slow to seed; a mixed counter is neither, and gives the
same numbers on every machine and version, one at a time or a million at once.
"""

import numpy as np

# Odd 2^64 / golden ratio and the multipliers of SplitMix64 (Steele, Lea & Flood 2014,
# doi:10.1145/2660193.2660195; Stafford's variant 13).
GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix64(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every input bit flips every output bit half of the time.

    Args:
        values: uint64, any shape; left as it is.
    """
    mixed = values ^ (values >> _30)
    mixed *= _FIRST
    mixed ^= mixed >> _27
    mixed *= _SECOND
    mixed ^= mixed >> _31
    return mixed


def stream_key(*words: int) -> int:
    """One 64-bit key for a tuple of integers, in which every word and its place counts."""
    key = np.zeros(1, dtype=np.uint64)
    for word in words:
        key = mix64(key + np.uint64((word + GOLDEN) % 2**64))
    return int(key[0])


def stream(key: int, length: int) -> np.ndarray:
    """The counters key + GOLDEN, key + 2 GOLDEN, …; mixed, they are SplitMix64's output."""
    steps = np.arange(1, length + 1, dtype=np.uint64)
    return steps * np.uint64(GOLDEN) + np.uint64(key)  # (length,)
