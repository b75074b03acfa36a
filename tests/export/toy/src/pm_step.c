/* States: w (5, on storage), b (1, in RAM), scale (1, an integer constant). The arena: page 0, w 32, b 56. */
#include "pm_runtime.h"

#ifdef TOY_HEAP
#include <stdlib.h>
#endif

#define W_SLOT (1u + TOY_GRADIENT_SLOTS + PM_COMMIT) /* behind the record */
#define B_SLOT (W_SLOT + 1u)

uint32_t pm_holds;

static _Alignas(16) unsigned char pm_arena[PM_ARENA_BYTES * PM_SCALE];
#define PM_REALS(offset) ((pm_real *)(void *)(pm_arena + (offset) * PM_SCALE))

const uint32_t pm_slot_bytes[] = {
    4,
#ifdef TOY_GRADIENTS
    20, 4,
#endif
#if PM_COMMIT
    PM_RECORD_BYTES,
#endif
    20, 4,
#if PM_COMMIT
    PM_SEAL_BYTES,
#endif
};
const pm_tensor_t pm_inputs_info[PM_INPUTS] = {{5, 0}, {1, 4}};
const pm_tensor_t pm_states_info[PM_STATES] = {{5, 0}, {1, 0}, {1, 4}};
const pm_tensor_t pm_gradients_info[] = {{5, 0}, {1, 0}};

static int out(uint32_t slot, const void *from, uint32_t bytes)
{
    PM_TRY(pm_page_out(slot, from, bytes * PM_SCALE));
    return pm_page_wait(slot);
}

static int in(uint32_t slot, void *to, uint32_t bytes)
{
    PM_TRY(pm_page_in(slot, to, bytes * PM_SCALE));
    return pm_page_wait(slot);
}

int pm_init(void)
{
    for (int i = 0; i < 5; i++) PM_REALS(32)[i] = PM_C(0.125) * (pm_real)i;
    *PM_REALS(56) = PM_C(0.5);
#if PM_COMMIT
    PM_TRY(pm_commit_clear());
    PM_TRY(pm_commit_begin(0));
    PM_TRY(out(PM_NEW(W_SLOT), PM_REALS(32), 20));
    PM_TRY(out(PM_NEW(B_SLOT), PM_REALS(56), 4));
    PM_TRY(pm_commit());
#else
    PM_TRY(out(W_SLOT, PM_REALS(32), 20));
#endif
    PM_FREE(0, 56);
    return PM_OK;
}

#if PM_COMMIT
int pm_load_state(void)
{
    PM_TRY(in(PM_OLD(W_SLOT), PM_REALS(32), 20));
    return in(PM_OLD(B_SLOT), PM_REALS(56), 4);
}
#endif

int pm_step(const void *const inputs[PM_INPUTS], pm_real lr, pm_real *loss)
{
    const pm_real *const x = inputs[0];
    const int32_t k = *(const int32_t *)inputs[1];
    pm_real *const w = PM_REALS(32);
    pm_real *const g = PM_REALS(0);
    pm_real *const b = PM_REALS(56);
#ifdef TOY_DEEP
    volatile unsigned char deep[TOY_DEEP];
    for (uint32_t i = TOY_DEEP; i-- > 0;) deep[i] = 1;
    if (deep[TOY_DEEP / 2] != 1) return PM_ERROR_PAGE;
#endif
#ifdef TOY_HEAP
    void *volatile const heap = malloc(16);
    if (!heap) return PM_ERROR_PAGE;
#endif
    PM_NODE(0);
    PM_TRY(pm_page_in(PM_OLD(W_SLOT), w, 20 * PM_SCALE));
    PM_TRY(pm_page_wait(PM_OLD(W_SLOT)));
    pm_real sum = *b;
    for (int i = 0; i < 5; i++) sum += w[i] * x[i];
    sum = (pm_real)k * sum - PM_C(1);
    *loss = sum * sum;
    *g = PM_C(2) * sum * (pm_real)k;
    PM_TRY(out(0, g, 4));
    PM_FREE(0, 4);
    PM_TRY(in(0, g, 4));
    PM_NODE(1);
#ifdef TOY_GRADIENTS
    for (int i = 0; i < 5; i++) w[i] = *g * x[i];
    PM_TRY(out(1, w, 20));
    PM_TRY(out(2, g, 4));
    (void)lr;
#else
    for (int i = 0; i < 5; i++) w[i] -= lr * *g * x[i];
#if PM_COMMIT
    PM_TRY(pm_commit_begin(1));
#endif
    PM_TRY_TORN(out(PM_NEW(W_SLOT), w, 20));
    PM_NODE(2);
    *b -= lr * *g;
#if PM_COMMIT
    PM_TRY_TORN(out(PM_NEW(B_SLOT), b, 4));
    PM_TRY_TORN(pm_commit());
#endif
#endif
    PM_FREE(0, 56);
    return PM_OK;
}

static int copy(const pm_real *from, uint32_t elements, uint32_t first, uint32_t count, pm_real *to)
{
    if (first > elements || count > elements - first) return PM_ERROR_INDEX;
    memcpy(to, from + first, count * sizeof *to);
    return PM_OK;
}

int pm_read_state_part(int index, uint32_t first, uint32_t count, pm_real *to)
{
    static const int32_t scale = 7;
    if (index == 1) return copy(PM_REALS(56), 1, first, count, to);
    if (index == 2) memcpy(to, &scale, sizeof scale);
    if (index == 2) return PM_OK;
    if (index != 0) return PM_ERROR_INDEX;
    PM_TRY(in(PM_OLD(W_SLOT), PM_REALS(32), 20));
    return copy(PM_REALS(32), 5, first, count, to);
}

int pm_read_state(int index, pm_real *to)
{
    return index < 0 || index >= PM_STATES ? PM_ERROR_INDEX
                                           : pm_read_state_part(index, 0, pm_states_info[index].elements, to);
}

int pm_write_state_part(int index, uint32_t first, uint32_t count, const pm_real *from)
{
    if (index == 1) return copy(from, 1, first, count, PM_REALS(56));
    if (index == 2) return PM_READ_ONLY;
    if (index != 0 || first > 5 || count > 5 - first) return PM_ERROR_INDEX;
    PM_TRY(in(PM_OLD(W_SLOT), PM_REALS(32), 20));
    memcpy(PM_REALS(32 + 4 * first), from, count * sizeof *from);
    return out(PM_OLD(W_SLOT), PM_REALS(32), 20);
}

int pm_read_gradient_part(int index, uint32_t first, uint32_t count, pm_real *to)
{
    if (index != 0 && index != 1) return PM_ERROR_INDEX;
    PM_TRY(in(1u + (uint32_t)index, PM_REALS(32), index ? 4 : 20));
    return copy(PM_REALS(32), pm_gradients_info[index].elements, first, count, to);
}

int pm_read_gradient(int index, pm_real *to)
{
    return index < 0 || index >= 2 ? PM_ERROR_INDEX
                                   : pm_read_gradient_part(index, 0, pm_gradients_info[index].elements, to);
}
