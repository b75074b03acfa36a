/* Random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a function
   of a counter and a key, without a state.

   Word w of block b at a site of a step is word w of Philox with the counter (b, site, 0, 0) and the key
   (pm_random_step, PM_SEED). Sites are the random operators of a step in their order, from 0 on; element e of an
   operator has word e % 4 of block e / 4. An operator that is recomputed within a step thus draws the same mask, and
   each step draws another one. Only the upper 24 bits of a word are used. Dropout: an element is dropped if they are
   below the ratio times 2^24. Uniform: they are multiplied by 2^-24. Normal: sqrt(-2 log(u + 2^-24)) times the
   cosine, then the sine, of 2 pi v, for two uniform words u and v (Box and Muller). Stochastic rounding has separate
   counters, whose third word is 1: see pm_q8_gradients.h. */
#ifndef PM_RANDOM_H
#define PM_RANDOM_H

#include "pm_real.h"

#ifndef PM_SEED
#define PM_SEED 0u
#endif

extern uint32_t pm_random_step; /* number of the step, which the program increments */

typedef struct {
    uint32_t word[4];
} pm_random_block;

/* Returns a number from 0 to below 1. */
static inline pm_real pm_random_unit(uint32_t word)
{
    return (pm_real)(word >> 8) * PM_C(0x1p-24);
}

/* Computes the words for a counter and a key. */
static inline pm_random_block pm_random_of(uint32_t block, uint32_t site, uint32_t use, uint32_t key_0, uint32_t key_1)
{
    pm_random_block c = {{block, site, use, 0}};
    for (int32_t round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)0xD2511F53u * c.word[0];
        const uint64_t second = (uint64_t)0xCD9E8D57u * c.word[2];
        c.word[0] = (uint32_t)(second >> 32) ^ c.word[1] ^ key_0;
        c.word[1] = (uint32_t)second;
        c.word[2] = (uint32_t)(first >> 32) ^ c.word[3] ^ key_1;
        c.word[3] = (uint32_t)first;
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return c;
}

static inline pm_random_block pm_random(uint32_t block, uint32_t site)
{
    return pm_random_of(block, site, 0, pm_random_step, PM_SEED);
}

#endif
