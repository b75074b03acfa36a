/* Two networks on one flash chip: `one_chip WORD...` does what the words say, one after the other, and prints a line for
   each. FIRST and SECOND are what their names begin with; both see the chip through a bus of their own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include FIRST_HEADER
#include SECOND_HEADER

#define JOIN(prefix, name) prefix##name
#define NAMED(prefix, name) JOIN(prefix, name)
#define FIRST_(name) NAMED(FIRST, name)
#define SECOND_(name) NAMED(SECOND, name)

enum { ELEMENTS = 4096, OTHER = 16, EMPTY = 8 };

#ifndef CHIP_SIZE
#define CHIP_SIZE 20 /* as a power of two */
#endif
static uint8_t chip[1u << 20], before[1u << 20];
static int stuck = -1; /* what the bus reads, whatever the chip says */
static unsigned long changes, sent, stuck_from, stuck_until;

static int bus(const uint8_t *command, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    static const uint8_t id[3] = {0xEF, 0x40, CHIP_SIZE};
    const uint32_t at = ((uint32_t)command[1] << 16 | (uint32_t)command[2] << 8 | command[3]) & (sizeof chip - 1u);
    if (command[0] == 0x05) *in = 0;
    if (command[0] == 0x9F) memcpy(in, id, bytes);
    if (command[0] == 0x03) memcpy(in, chip + at, bytes);
    if (command[0] == 0x20) memset(chip + at, 0xFF, 4096), changes++;
    for (uint32_t k = 0; command[0] == 0x02 && k < bytes; k++) chip[at + k] &= out[k], changes++;
    sent++;
    if (in && stuck >= 0 && sent >= stuck_from && sent < stuck_until) memset(in, stuck, bytes);
    return 0;
}

/* Commands of one byte have no address. */
static int to_bus(const uint8_t *command, uint32_t count, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    uint8_t whole[4] = {0};
    memcpy(whole, command, count);
    return bus(whole, out, in, bytes);
}

int FIRST_(_spi_transfer)(const uint8_t *c, uint32_t n, const uint8_t *out, uint8_t *in, uint32_t bytes);
int SECOND_(_spi_transfer)(const uint8_t *c, uint32_t n, const uint8_t *out, uint8_t *in, uint32_t bytes);

int FIRST_(_spi_transfer)(const uint8_t *c, uint32_t n, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    return to_bus(c, n, out, in, bytes);
}

int SECOND_(_spi_transfer)(const uint8_t *c, uint32_t n, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    return to_bus(c, n, out, in, bytes);
}

static float data[8][ELEMENTS];
static const void *const inputs[8] = {data[0], data[1], data[2], data[3], data[4], data[5], data[6], data[7]};

/* A network by its functions. */
typedef struct {
    int (*init)(void), (*resume)(void), (*step)(const void *const *, float, float *);
    uint32_t *steps;
} network_t;

static int first_step(const void *const *of, float lr, float *loss)
{
    return FIRST_(_step)(of, lr, loss);
}

static int second_step(const void *const *of, float lr, float *loss)
{
    return SECOND_(_step)(of, lr, loss);
}

int main(int count, char **words)
{
    const network_t networks[2] = {
        {FIRST_(_init), FIRST_(_resume), first_step, &FIRST_(_steps)},
        {SECOND_(_init), SECOND_(_resume), second_step, &SECOND_(_steps)},
    };
    float loss;
    memset(chip, 0xFF, sizeof chip);
    for (int k = 1; k < count; k++) { /* resume1, start1, init1, step1, and of the second network */
        const network_t *network = &networks[strchr(words[k], '2') != 0];
        int error = 0;
        changes = 0;
        memcpy(before, chip, sizeof chip);
        if (strncmp(words[k], "stuck:", 6) == 0) { /* stuck:VALUE or stuck:VALUE:FROM:UNTIL, transfers from now on */
            char *end;
            stuck = (int)strtol(words[k] + 6, &end, 0);
            sent = 0, stuck_from = 0, stuck_until = ~0ul;
            if (*end == ':') stuck_from = strtoul(end + 1, &end, 0), stuck_until = strtoul(end + 1, &end, 0);
            continue;
        }
        if (strncmp(words[k], "resume", 6) == 0) error = network->resume();
        if (strncmp(words[k], "init", 4) == 0) error = network->init();
        if (strncmp(words[k], "step", 4) == 0) error = network->step(inputs, 0.01f, &loss);
        if (strncmp(words[k], "start", 5) == 0) { /* as the pages say */
            error = network->resume();
            if (error == EMPTY) error = network->init();
        }
        printf("%s %d %u%s\n", words[k], error, (unsigned)*network->steps,
               changes || memcmp(before, chip, sizeof chip) ? " changed" : "");
    }
    return 0;
}
