/* The firmware: a touchpad of 8 by 8 that learns how its user writes digits. */
#include "pm.h"
#include "pm_platform.h"
#include "pm_text.h"

#define ROUNDS 6u
#define STEPS PM_COMMIT_EVERY /* of a round, which ends with a generation of state on flash */

static struct {
    uint8_t image[64];
    int32_t label;
} digit;
static const void *const inputs[PM_INPUTS] = {digit.image, &digit.label};
/* The digits: STEPS to learn, 30 to find the best state, tests of the user (30) and of others (90). */
static const uint32_t ends[4] = {STEPS, STEPS + 30, STEPS + 60, STEPS + 150};
static int file;

static void print(const char *name, uint32_t number)
{
    char text[PM_TEXT_BYTES];
    pm_say(name);
    pm_say(pm_text_of_integer(number, text));
}

static void check(int error)
{
    if (error) pm_exit(10 + error);
}

static void read_digit(uint32_t number) /* stands for the touchpad */
{
    if (pm_file_seek(file, number * sizeof digit) < 0 || !pm_file_read(file, &digit, sizeof digit)) pm_exit(2);
}

/* Prints how many digits are right: to find the best state, of the user, of others. Returns the loss of the first. */
static pm_real evaluate(void)
{
    pm_real loss, sum = 0;
    for (int k = 1; k < 4; k++) {
        uint32_t right = 0, one;
        for (uint32_t number = ends[k - 1]; number < ends[k]; number++, right += one) {
            read_digit(number);
            check(pm_evaluate(inputs, &loss, &one));
            if (k == 1) sum += loss;
        }
        print(" ", right);
    }
    return sum;
}

static void learn(pm_real lr)
{
    pm_real loss;
#if PM_REPLAY /* from outputs of the frozen front, which are on flash */
    check(pm_step_stored(PM_ANY_SAMPLE, lr, &loss));
#else /* from digits, which a board would have to store as well */
    read_digit((pm_steps * 2654435761u >> 8) % STEPS);
    check(pm_step(inputs, lr, &loss));
#endif
}

/* Arguments: the file of digits, the learning rate, and after how many ticks the power fails, or 0. */
int main(int argc, char **argv)
{
    uint32_t cut, best_steps, ticks = 0;
    pm_real lr, best;
    if (argc != 4 || !pm_real_of_text(argv[2], &lr) || !pm_integer_of_text(argv[3], &cut)) return 2;
    file = pm_file_open(argv[1], PM_FILE_READ);
    if (cut) pm_stop_after(cut);
    const int error = pm_resume(); /* after a restart; at first there is nothing to resume */
    check(error == PM_ERROR_EMPTY ? pm_init() : error);
    print("resumed ", pm_steps);
    pm_start_clock();
#if PM_REPLAY
    for (; pm_seen < STEPS; check(pm_keep_sample(inputs, 0))) read_digit(pm_seen);
    ticks = pm_ticks();
#endif
    for (uint32_t round = pm_steps / STEPS; round <= ROUNDS; round++) {
        print("\nround ", round);
        const pm_real loss = evaluate();
        if (pm_best(&best, &best_steps) == PM_ERROR_EMPTY || loss < best) check(pm_keep_best(loss));
        const uint32_t start = pm_ticks();
        for (uint32_t k = 0; k < STEPS && round < ROUNDS; k++) learn(lr);
        ticks += pm_ticks() - start;
    }
    check(pm_restore_best());
    print("\nlearning_ticks ", ticks);
    pm_say("\nbest");
    (void)evaluate();
    pm_say("\n");
#ifdef PM_WEAR /* with DRIVER=nor */
    pm_print_wear();
#endif
    pm_print_figures();
    return 0;
}
