/* Instructions of each node (PROFILE=1), from the clock of the emulated board. */
#include "../src/pm_runtime.h"
#include "pm_platform.h"
#include "pm_text.h"

#ifdef __arm__
#define PM_ELSEWHERE __attribute__((section(".measure"))) /* memory that does not count as RAM of the step */
#else
#define PM_ELSEWHERE
#endif

static uint64_t pm_spent[PM_NODES + 1] PM_ELSEWHERE;
static uint32_t pm_current = PM_NODES, pm_since;
static int pm_is_counting;

void pm_profile_start(void)
{
    pm_is_counting = 1;
    pm_current = PM_NODES;
    pm_since = pm_ticks();
}

void pm_profile_stop(void)
{
    (void)pm_profile_node(PM_NODES);
    pm_is_counting = 0;
}

uint32_t pm_profile_node(uint32_t node)
{
    const uint32_t before = pm_current;
    if (!pm_is_counting) return PM_NODES;
    pm_spent[before] += pm_ticks() - pm_since;
    pm_current = node;
    pm_since = pm_ticks();
    return before;
}

/* Prints one line for each node: its number, and its instructions in one step; last, the instructions outside of
   nodes. */
void pm_profile_print(uint32_t steps)
{
    char text[PM_TEXT_BYTES];
    for (uint32_t node = 0; node <= PM_NODES; node++) {
        pm_complain(node < PM_NODES ? "node " : "other_instructions ");
        if (node < PM_NODES) {
            pm_complain(pm_text_of_integer(node, text));
            pm_complain(" ");
        }
        pm_complain(pm_text_of_integer(pm_spent[node] * PM_TICK / (steps ? steps : 1u), text));
        pm_complain("\n");
    }
}
