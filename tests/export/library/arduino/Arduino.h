// What the sketch takes of Arduino's core.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum { LOW = 0, HIGH = 1, OUTPUT = 1 };

inline long random(long from, long until)
{
    return from + std::rand() % (until - from);
}

inline void delay(unsigned long)
{
    std::exit(1); // the sketch waits where it has stopped
}

void pinMode(int pin, int mode);
void digitalWrite(int pin, int level);

struct HardwareSerial {
    void begin(unsigned long) {}
    void print(const char *text) { std::fputs(text, stdout); }
    void println(int value) { std::printf("%d\n", value); }
    void println(double value, int digits) { std::printf("%.*f\n", digits, value); }
};
inline HardwareSerial Serial;
