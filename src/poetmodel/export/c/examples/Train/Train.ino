/* Trains @PREFIX@ and says the loss of each step. */
#include <pm.h>
@SPI@
@ARRAYS@
static const void *const inputs[PM_INPUTS] = {@POINTERS@};

/* A batch of yours belongs here, from a sensor or a card: this is noise, of class 0. */
static void next_batch()
{
@FILL@
}

static void stop(int error)
{
    while (true) { /* again and again: a monitor may be opened late */
        Serial.print("error ");
        Serial.println(error);
        delay(1000);
    }
}

void setup()
{
    Serial.begin(115200);
@SELECT@    @SKETCHBEGIN@
    if (error) stop(error);
}

void loop()
{
    pm_real loss = 0;
    next_batch();
    const int error = pm_step(inputs, @RATE@, &loss);
    if (error == PM_ERROR_INPUT || error == PM_ERROR_NUMBER) return; /* a bad batch: state is as before */
    if (error) stop(error);
    Serial.println(loss, 6);
}
