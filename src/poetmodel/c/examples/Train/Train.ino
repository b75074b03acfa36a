/* Trains @PREFIX@ and prints the loss of each step. */
#include <pm.h>
@IF SPI@

#ifndef ARDUINO_ARCH_ESP32
#include <SPI.h>

static const int FLASH_SELECT = 10; /* the pin that selects the flash chip */

/* The function of the SPI bus that storage.c needs. */
extern "C" int pm_spi_transfer(
    const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    SPI.beginTransaction(SPISettings(8000000, MSBFIRST, SPI_MODE0));
    digitalWrite(FLASH_SELECT, LOW);
    for (uint32_t k = 0; k < command_bytes; k++) SPI.transfer(command[k]);
    for (uint32_t k = 0; k < bytes; k++) {
        const uint8_t received = SPI.transfer(out ? out[k] : 0);
        if (in) in[k] = received;
    }
    digitalWrite(FLASH_SELECT, HIGH);
    SPI.endTransaction();
    return PM_OK;
}
#endif
@END SPI@

@ARRAYS@
static const void *const inputs[PM_INPUTS] = {@POINTERS@};

/* Replace this with a batch of your data, from a sensor or a card: this is noise, of class 0. */
static void next_batch()
{
@FILL@
}

@IF EVALUATION@
/* Prints the loss of a batch in evaluation mode. Replace next_batch here: use data that does not train. */
static void evaluate()
{
    pm_real loss = 0;
    uint32_t correct = 0;
    next_batch();
    if (pm_evaluate(inputs, &loss, &correct)) return;
    Serial.print("evaluation ");
    Serial.println(loss, 6);
@IF BEST@
    pm_real best = 0;
    const int kept = pm_best(&best, 0);
    if (kept == PM_ERROR_EMPTY || (kept == PM_OK && loss < best)) pm_keep_best(loss); /* pm_restore_best() at the end */
@END BEST@
}

@END EVALUATION@
static void stop(int error)
{
    while (true) { /* repeatedly: a monitor may be opened late */
        Serial.print("error ");
        Serial.println(error);
        delay(1000);
    }
}

void setup()
{
    Serial.begin(115200);
@IF SPI@
#ifndef ARDUINO_ARCH_ESP32
    pinMode(FLASH_SELECT, OUTPUT);
    digitalWrite(FLASH_SELECT, HIGH);
    SPI.begin();
#endif
@END SPI@
@IF COMMIT@
    int error = pm_resume();                        /* after a restart: state of the last commit */
@IF MIGRATES@
    if (error == PM_ERROR_OTHER) error = pm_migrate(); /* first start of this program: state of the one before */
@END MIGRATES@
    if (error == PM_RESUMED_OLDER) error = PM_OK;   /* or of the commit before, if that is damaged */
    if (error == PM_ERROR_EMPTY) error = pm_init(); /* no state on storage; with other errors call again */
    /* PM_ERROR_OTHER: storage has state of another program; pm_init would replace it */
@END COMMIT@
@UNLESS COMMIT@
    int error = pm_init();
@END COMMIT@
    if (error) stop(error);
}

void loop()
{
    pm_real loss = 0;
    next_batch();
    const int error = pm_step(inputs, @RATE@, &loss);
    if (error == PM_ERROR_INPUT || error == PM_ERROR_NUMBER) return; /* an invalid batch: state is unchanged */
    if (error) stop(error);
    Serial.println(loss, 6);
@IF REPLAY@
    if (pm_keep_sample(inputs, 0) == PM_OK) pm_step_stored(PM_ANY_SAMPLE, @RATE@, &loss); /* an earlier sample */
@END REPLAY@
@IF EVALUATION@
    static uint32_t steps = 0;
    if (++steps % 100 == 0) evaluate();
@END EVALUATION@
}
