/* A step whose data has an index that is out of range: `refuse BATCH INPUT ELEMENT VALUE...`. It is refused as one call
   and in slices, with the state and the loss as before, and the batch as it was trains on. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pm.h"

enum { REFUSED = 14, NODES_AT_ONCE = 2, NO_LOSS = -77 };

static void *inputs[PM_INPUTS];
static pm_real *before[PM_STATES], *after[PM_STATES];

static int state(pm_real **to)
{
    for (int k = 0; k < PM_STATES; k++) {
        if (!to[k] && !(to[k] = malloc((size_t)pm_states_info[k].elements * sizeof(pm_real) + 1))) return 1;
        if (pm_read_state(k, to[k])) return 1;
    }
    return 0;
}

static int changed(void)
{
    if (state(after)) return 1;
    for (int k = 0; k < PM_STATES; k++) {
        const size_t size = pm_states_info[k].integer_bytes ? pm_states_info[k].integer_bytes : sizeof(pm_real);
        if (memcmp(before[k], after[k], size * pm_states_info[k].elements)) return 1;
    }
    return 0;
}

static int sliced(const void *const *given)
{
    int error = pm_step_begin(given, (pm_real)0.1);
    while (!error || error == PM_MORE) {
        error = pm_step_some(NODES_AT_ONCE);
        if (error != PM_MORE) return error;
    }
    return error;
}

int main(int count, char **words)
{
    const void *given[PM_INPUTS] = {0};
    pm_real loss;
#if PM_OUTPUTS
    static pm_real early[PM_OUTPUTS];
    if (pm_infer(given, early) != PM_ERROR_STATE) return 5;
#endif
    FILE *file = fopen(words[1], "rb");
    if (!file || pm_init()) return 1;
    for (int k = 0; k < PM_INPUTS; k++) {
        const size_t size = pm_inputs_info[k].integer_bytes ? pm_inputs_info[k].integer_bytes : sizeof(pm_real);
        inputs[k] = malloc(size * pm_inputs_info[k].elements);
        if (!inputs[k] || fread(inputs[k], size, pm_inputs_info[k].elements, file) != pm_inputs_info[k].elements) return 1;
        given[k] = inputs[k];
    }
    int32_t *element = (int32_t *)inputs[atoi(words[2])] + atoi(words[3]);
    const int32_t good = *element;
    for (int k = 4; k < count; k++) {
        if (pm_step(given, (pm_real)0.1, &loss) || state(before)) return 2;
        loss = (pm_real)NO_LOSS;
        *element = (int32_t)strtol(words[k], NULL, 10);
        const int whole = pm_step(given, (pm_real)0.1, &loss);
        const int some = sliced(given);
        if (whole != REFUSED || some != REFUSED || loss != (pm_real)NO_LOSS || changed()) {
            printf("%s: errors %d and %d, loss %g\n", words[k], whole, some, (double)loss);
            return 3;
        }
#if PM_OUTPUTS
        static pm_real outputs[PM_OUTPUTS];
        if (atoi(words[2]) == 0 && pm_infer(given, outputs) != REFUSED) return 4;
#endif
        *element = good;
    }
    return pm_step(given, (pm_real)0.1, &loss);
}
