/* Trains over NOR flash of its own, with commits and checksums, as an application in C++ would. What it is to do, and
   what goes wrong, is in the environment; see tests/export/test_commits.py. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "pm.h"
extern "C" {
#include "port/pm_pages.h"
}

/* The NOR flash: all storage, or, where that forgets, what keeps the generations. */
#if PM_VOLATILE
#define NOR_BYTES PM_COMMITTED_BYTES
#define NOR_BLOCK PM_COMMIT_BLOCK
#define NOR_UNIT PM_COMMIT_UNIT
#define nor_read pm_flash_read
#define nor_write pm_flash_write
#else
#define NOR_BYTES PM_STORED_BYTES
#define NOR_BLOCK PM_STORAGE_BLOCK
#define NOR_UNIT PM_STORAGE_UNIT
#define nor_read pm_storage_read
#define nor_write pm_storage_write
#endif

static unsigned char *memory;
static long fuel, reads, writes, bytes, erases, fail_read, fail_write, failing;
static int code;
static std::vector<long> worn(NOR_BYTES / NOR_BLOCK + 1u);

static long number(const char *name, long otherwise)
{
    const char *const text = getenv(name);
    return text ? strtol(text, 0, 10) : otherwise;
}

static void burn()
{
    if (fuel >= 0 && fuel-- == 0) _exit(99);
}

/* FAIL_READ: the first call since the start that returns CODE; STEP_READ, STEP_WRITE: since the first step. FAILING: so
   many do. */
static bool fails(long call, long first)
{
    return first > 0 && call >= first && call < first + failing;
}

extern "C" int nor_read(uint32_t address, void *to, uint32_t count)
{
    if (fails(++reads, fail_read)) return code;
    if (address > NOR_BYTES || count > NOR_BYTES - address) abort();
    memcpy(to, memory + address, count);
    return 0;
}

extern "C" int nor_write(uint32_t address, const void *from, uint32_t count)
{
    if (fails(++writes, fail_write)) return code;
    if (address > NOR_BYTES || count > NOR_BYTES - address || address % NOR_UNIT) abort();
    bytes += count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = address + i;
        if (at % NOR_BLOCK == 0) {
            erases++;
            worn[at / NOR_BLOCK]++;
            for (uint32_t k = at; k < at + NOR_BLOCK && k < NOR_BYTES; k++) {
                if (k % 64 == 0) burn();
                memory[k] = 0xFF;
            }
        }
        burn();
        if (memory[at] != 0xFF) abort(); /* not erased */
        memory[at] = static_cast<const unsigned char *>(from)[i];
    }
    return 0;
}

#if PM_VOLATILE
static std::vector<unsigned char> forgetful(PM_STORED_BYTES + 1u, 0x5A); /* lost with the process */

extern "C" int pm_storage_read(uint32_t address, void *to, uint32_t count)
{
    if (address > PM_STORED_BYTES || count > PM_STORED_BYTES - address) abort();
    memcpy(to, forgetful.data() + address, count);
    return 0;
}

extern "C" int pm_storage_write(uint32_t address, const void *from, uint32_t count)
{
    burn();
    if (address > PM_STORED_BYTES || count > PM_STORED_BYTES - address) abort();
    memcpy(forgetful.data() + address, from, count);
    return 0;
}

extern "C" const void *pm_storage_address(uint32_t address)
{
    return forgetful.data() + address;
}
#else
extern "C" const void *pm_storage_address(uint32_t address)
{
    return memory + address;
}
#endif

static int write_state(const char *name)
{
    FILE *const file = fopen(name, "wb");
    for (int k = 0; k < PM_STATES; k++) {
        std::vector<pm_real> values(pm_states_info[k].elements + 1u);
        if (const int error = pm_read_state(k, values.data())) return error;
        fwrite(values.data(), 4, pm_states_info[k].elements, file);
    }
    return fclose(file);
}

int main(int, char **argv) /* FLASH STEPS BATCHES STATE */
{
    const int file = open(argv[1], O_RDWR | O_CREAT, 0644);
    const bool fresh = lseek(file, 0, SEEK_END) == 0;
    if (ftruncate(file, NOR_BYTES + 1)) return 1;
    memory = static_cast<unsigned char *>(mmap(0, NOR_BYTES + 1, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    if (fresh) memset(memory, 0xA5, NOR_BYTES);
    fuel = number("FUEL", -1), fail_read = number("FAIL_READ", 0);
    failing = number("FAILING", 1), code = static_cast<int>(number("CODE", 2));

    std::vector<std::vector<char>> batch(PM_INPUTS);
    const void *inputs[PM_INPUTS];
    int error = 0;
#if PM_COMMIT
    error = pm_resume();
    printf("resume %d steps %u\n", error, pm_steps);
    if (number("ONLY_RESUME", 0)) return 0;
    if (error == PM_RESUMED_OLDER) error = PM_OK;
    if (error == PM_ERROR_EMPTY) error = pm_init();
    uint32_t done = pm_steps;
#else
    error = pm_init();
    uint32_t done = 0;
#endif
    printf("began %d bytes %ld erases %ld\n", error, bytes, erases);
    if (error) return 2;
    if (const char *const change = getenv("CHANGE")) {
        std::vector<pm_real> values(pm_states_info[0].elements, static_cast<pm_real>(atof(change)));
        error = pm_write_state(0, values.data());
        printf("changed %d\n", error);
    }
    reads = writes = 0;
    fail_read = number("STEP_READ", 0), fail_write = number("STEP_WRITE", 0);
    FILE *const batches = fopen(argv[3], "rb");
    for (uint32_t step = 0; step < static_cast<uint32_t>(atoi(argv[2])); step++) {
        for (int k = 0; k < PM_INPUTS; k++) {
            batch[k].resize(pm_inputs_info[k].elements * 4u);
            if (fread(batch[k].data(), 1, batch[k].size(), batches) != batch[k].size()) return 1;
            inputs[k] = batch[k].data();
        }
        if (step < done) continue;
        bytes = erases = 0;
        pm_real loss;
        error = pm_step(inputs, 0.1f, &loss);
        printf("step %d bytes %ld erases %ld\n", error, bytes, erases);
#if PM_COMMIT
        if (number("COMMIT_NOW", 0) == static_cast<long>(step) + 1) {
            bytes = erases = 0;
            const int now = pm_commit_now();
            printf("now %d bytes %ld erases %ld\n", now, bytes, erases);
        }
        if (error == PM_TORN && pm_resume()) return 3;
#endif
        if (error && (error = pm_step(inputs, 0.1f, &loss))) return 4;
    }
    long most = 0, sum = 0;
    for (const long times : worn) {
        most = times > most ? times : most;
        sum += times;
    }
    printf("worn %ld of %ld\n", most, sum);
    return write_state(argv[4]);
}
