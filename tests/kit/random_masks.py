"""The random numbers of exported code, computed in NumPy as ``pm_random.h`` defines them."""

import numpy as np


def draw_words(step, site, count, *, stream=0, seed=0):
    """Return `count` words of Philox 4x32-10 at a site of a step.

    `stream` is the third word of the counters: 1 for stochastic rounding, otherwise 0.
    """
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    zeros = np.zeros_like(blocks)
    counter = [blocks, zeros + np.uint64(site), zeros + np.uint64(stream), zeros]
    keys = [step, seed]
    for _ in range(10):
        low, high = (
            counter[position] * np.uint64(factor)
            for position, factor in ((0, 0xD2511F53), (2, 0xCD9E8D57))
        )
        counter = [
            (high >> np.uint64(32)) ^ counter[1] ^ np.uint64(keys[0]),
            high & np.uint64(0xFFFFFFFF),
            (low >> np.uint64(32)) ^ counter[3] ^ np.uint64(keys[1]),
            low & np.uint64(0xFFFFFFFF),
        ]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return np.stack(counter, axis=1).reshape(-1)[:count].astype(np.uint32)


def draw_mask(step, site, count, dropped_ratio):
    """Return the mask of `count` elements under dropout: True for each that is not dropped."""
    return (draw_words(step, site, count) >> 8) >= round(dropped_ratio * 2**24)


def draw_uniform(step, site, count, **options):
    """Return `count` uniform numbers from 0 to below 1."""
    return (draw_words(step, site, count, **options) >> 8) / 2.0**24


def draw_normal(step, site, count):
    """Return `count` numbers of the standard normal distribution."""
    pairs = draw_uniform(step, site, count + count % 2).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log(pairs[:, 0] + 2.0**-24)), 2 * np.pi * pairs[:, 1]
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1).reshape(-1)[:count]
