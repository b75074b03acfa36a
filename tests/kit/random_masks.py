"""The random numbers of exported code, computed another way: ``pm_random.h`` says how."""

import numpy as np


def words(step, site, count, *, stream=0, seed=0):
    """Return `count` words of Philox 4x32-10 at a site of a step; 1 is the stream of rounding."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    zeros = np.zeros_like(blocks)
    counter = [blocks, zeros + np.uint64(site), zeros + np.uint64(stream), zeros]
    keys = [step, seed]
    for _ in range(10):
        low, high = (
            counter[place] * np.uint64(factor)
            for place, factor in ((0, 0xD2511F53), (2, 0xCD9E8D57))
        )
        counter = [
            (high >> np.uint64(32)) ^ counter[1] ^ np.uint64(keys[0]),
            high & np.uint64(0xFFFFFFFF),
            (low >> np.uint64(32)) ^ counter[3] ^ np.uint64(keys[1]),
            low & np.uint64(0xFFFFFFFF),
        ]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return np.stack(counter, axis=1).reshape(-1)[:count].astype(np.uint32)


def kept(step, site, count, dropped_ratio):
    """Return a mask of the `count` elements that are kept."""
    return (words(step, site, count) >> 8) >= round(dropped_ratio * 2**24)


def uniform(step, site, count, **more):
    """Return `count` uniform numbers from 0 to 1."""
    return (words(step, site, count, **more) >> 8) / 2.0**24


def normal(step, site, count):
    """Return `count` numbers of the standard normal distribution."""
    pairs = uniform(step, site, count + count % 2).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log(pairs[:, 0] + 2.0**-24)), 2 * np.pi * pairs[:, 1]
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1).reshape(-1)[:count]
