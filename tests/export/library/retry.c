/* Steps on storage that fails at one call after another, in the way that is given. What a step says is held to be so:
   with PM_TORN pm_resume takes it back, or all begins anew where nothing commits; with any other error the state is as
   before. The step is done again then. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "host/pm_faults.h"
#include "pm.h"

enum { STEPS = 3, ELEMENTS = 8192 };

void pm_exit(int status);
void pm_exit(int status)
{
    (void)status;
}

static pm_real batch[PM_INPUTS][ELEMENTS];
static pm_real expected[PM_STATES][ELEMENTS], found[ELEMENTS];

static int step(void)
{
    const void *inputs[PM_INPUTS];
    pm_real loss;
    for (int k = 0; k < PM_INPUTS; k++) inputs[k] = batch[k];
    return pm_step(inputs, (pm_real)0.1, &loss);
}

static int differs(void)
{
    for (int k = 0; k < PM_STATES; k++) {
        if (pm_read_state(k, found)) return 1;
        if (memcmp(found, expected[k], pm_states_info[k].elements * sizeof(pm_real))) return 1;
    }
    return 0;
}

int main(int count, char **words)
{
    int errors[PM_ERROR_ARENA + 1] = {0}, done = 0;
    for (int k = 0; k < PM_INPUTS; k++) {
        const int is_real = pm_inputs_info[k].integer_bytes == 0;
        for (uint32_t i = 0; is_real && i < pm_inputs_info[k].elements; i++) batch[k][i] = (pm_real)(i % 7u) / 7;
    }
    if (count != 2 || pm_init()) return 1;
    for (int k = 0; k < STEPS; k++) {
        if (step()) return 1;
    }
    for (int k = 0; k < PM_STATES; k++) {
        if (pm_read_state(k, expected[k])) return 1;
    }
    for (uint32_t call = 1; !done; call++) {
        int steps = 1;
        (void)pm_set_fault("fail", 0);
        if (pm_init() || step()) return 1;
        if (pm_set_fault(words[1], pm_reads + pm_writes + call)) return 1;
        const int error = step();
        done = error == PM_OK;
        (void)pm_set_fault("fail", 0);
        errors[error]++;
#if PM_COMMIT
        if (error == PM_TORN && pm_resume()) return 1;
#else
        if (error == PM_TORN) {
            steps = 0;
            if (pm_init()) return 1;
        }
#endif
        for (steps += done; steps < STEPS; steps++) {
            if (step()) return 1;
        }
        if (differs()) {
            printf("call %u: error %d, and another state\n", (unsigned)call, error);
            return 1;
        }
    }
    printf("%d torn, %d as before\n", errors[PM_TORN], errors[words[1][0] == 's' ? PM_ERROR_SHORT : PM_ERROR_PAGE]);
    return 0;
}
