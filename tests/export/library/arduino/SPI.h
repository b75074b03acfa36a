// What the sketch takes of Arduino's SPI library.
#pragma once
#include <cstdint>

enum { MSBFIRST = 1, SPI_MODE0 = 0 };

struct SPISettings {
    SPISettings(uint32_t, uint8_t, uint8_t) {}
};

struct SPIClass {
    void begin() {}
    void beginTransaction(SPISettings) {}
    void endTransaction() {}
    uint8_t transfer(uint8_t sent);
};
inline SPIClass SPI;
