/* A step whose data has an element that it refuses: `refuse BATCH STATUS INPUT ELEMENT VALUE...`. It is refused as one
   call and in slices, with the state and the loss as before. The batch as it was trains on, to the same end as without
   the refused ones. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pm.h"

enum { NODES_AT_ONCE = 2, NO_LOSS = -77 };

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

static void set(int input, int element, const char *word)
{
    if (pm_inputs_info[input].integer_bytes) {
        ((int32_t *)inputs[input])[element] = (int32_t)strtol(word, NULL, 10);
    } else {
        ((pm_real *)inputs[input])[element] = (pm_real)strtod(word, NULL);
    }
}

int main(int count, char **words)
{
    const void *given[PM_INPUTS] = {0};
    pm_real loss;
    const int refused = atoi(words[2]), input = atoi(words[3]), element = atoi(words[4]);
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
    const size_t size = pm_inputs_info[input].integer_bytes ? pm_inputs_info[input].integer_bytes : sizeof(pm_real);
    char *const place = (char *)inputs[input] + size * (size_t)element, good[sizeof(pm_real)];
    memcpy(good, place, size);
    for (int k = 5; k < count; k++) {
        if (pm_step(given, (pm_real)0.1, &loss) || state(before)) return 2;
        loss = (pm_real)NO_LOSS;
        set(input, element, words[k]);
        const int whole = pm_step(given, (pm_real)0.1, &loss);
        const int some = sliced(given);
        if (whole != refused || some != refused || loss != (pm_real)NO_LOSS || changed()) {
            printf("%s: errors %d and %d, loss %g\n", words[k], whole, some, (double)loss);
            return 3;
        }
#if PM_OUTPUTS
        static pm_real outputs[PM_OUTPUTS];
        if (refused == PM_ERROR_INPUT && input == 0 && pm_infer(given, outputs) != refused) return 4;
#endif
        memcpy(place, good, size);
    }
    if (pm_step(given, (pm_real)0.1, &loss) || state(before) || pm_init()) return 5;
    for (int k = 4; k < count; k++) {
        if (pm_step(given, (pm_real)0.1, &loss)) return 6;
    }
    return changed() ? 7 : 0;
}
