/* An application that trains three steps: whole, or in slices of as many nodes as its second word says. */
#include <stdio.h>
#include <stdlib.h>

#include "pm.h"

int nodes_seen[PM_NODES];

static float image[576], weight[288];
static int32_t label[4];

int main(int count, char **words)
{
    FILE *const file = fopen(words[1], "rb");
    const uint32_t nodes = count > 2 ? (uint32_t)atoi(words[2]) : 0;
    uint32_t slices = 0;
#ifdef PM_ARENA_EXTERN
    static _Alignas(PM_ALIGNMENT) unsigned char arena[PM_ARENA_BYTES + PM_ALIGNMENT];
    if (pm_init() != PM_ERROR_ARENA) return 101;
    if (pm_use_arena(arena + 1, PM_ARENA_BYTES) != PM_ERROR_ARENA) return 102;
    if (pm_use_arena(arena, PM_ARENA_BYTES - 1) != PM_ERROR_ARENA) return 103;
    if (pm_use_arena(arena, sizeof arena) != PM_OK) return 104;
#endif
    int error = pm_init();
    if (pm_step_some(1) != PM_ERROR_IDLE) return 105;
    for (int k = 0; k < 3 && !error; k++) {
        const void *inputs[PM_INPUTS] = {image, label};
        float loss = 0;
        if (fread(image, sizeof image, 1, file) != 1 || fread(label, sizeof label, 1, file) != 1) return 106;
        if (nodes == 0) {
            error = pm_step(inputs, 0.1f, &loss);
        } else {
            error = pm_step_begin(inputs, 0.1f);
            inputs[0] = 0; /* the pointers were copied */
            if (pm_step_begin(inputs, 0.1f) != PM_ERROR_BUSY) return 107;
            if (pm_step_some(0) != PM_MORE) return 108;
            for (error = PM_MORE; error == PM_MORE; slices++) {
                if (pm_read_state(0, weight) != PM_ERROR_BUSY || pm_write_state(0, weight) != PM_ERROR_BUSY) return 109;
                error = pm_step_some(nodes);
            }
            loss = pm_loss();
        }
        printf("%.9g\n", (double)loss);
    }
    for (int index = 0; index < PM_STATES && !error; index++) {
        error = pm_read_state(index, weight);
        for (uint32_t k = 0; k < pm_states_info[index].elements; k++) printf("%.9g\n", (double)weight[k]);
    }
    fprintf(stderr, "%u %d\n", slices, nodes_seen[2]);
    return error;
}
