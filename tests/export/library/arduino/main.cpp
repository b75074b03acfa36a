// A board: some rounds of the sketch, with a flash chip on the bus that a pin selects.
#include "Arduino.h"
#include "SPI.h"

#include <cstring>

void setup();
void loop();

static constexpr uint32_t CHIP_BYTES = 1u << 20;
static uint8_t chip[CHIP_BYTES]; // zeros: not erased
static int selected = HIGH;
static uint32_t sent_bytes, address;
static uint8_t command;
static bool enabled;

void pinMode(int, int) {}

void digitalWrite(int, int level)
{
    if (level == HIGH && selected == LOW) {
        const bool changes = command == 0x02 || command == 0x20;
        if (command == 0x20 && enabled) std::memset(chip + address / 4096 * 4096, 0xFF, 4096);
        if (command == 0x06) enabled = true;
        if (changes) enabled = false;
    }
    selected = level;
    sent_bytes = 0;
}

uint8_t SPIClass::transfer(uint8_t sent)
{
    if (selected != LOW) std::abort();
    const uint32_t number = sent_bytes++;
    if (number == 0) {
        command = sent;
        address = 0;
        return 0xFF;
    }
    if (command == 0x05) return 0; // never busy
    if (command == 0x9F) return number == 1 ? 0xEF : number == 2 ? 0x40 : 0x14; // 1 MiB
    if (number < 4) {
        address = address << 8 | sent;
        return 0xFF;
    }
    const uint32_t at = address + (number - 4);
    if (command == 0x03) return chip[at];
    if (command == 0x02 && enabled) chip[address / 256 * 256 + at % 256] &= sent;
    return 0xFF;
}

int main()
{
    setup();
    for (int round = 0; round < 30; round++) loop();
}
