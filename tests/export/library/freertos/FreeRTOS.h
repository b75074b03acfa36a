/* What of FreeRTOS a task of the pages calls, with the types that it has on an Arm core. */
#include <stddef.h>
#include <stdint.h>

typedef long BaseType_t;
typedef unsigned long UBaseType_t;
typedef uint32_t TickType_t;

#define pdFALSE ((BaseType_t)0)
#define pdTRUE ((BaseType_t)1)
#define portMAX_DELAY ((TickType_t)0xFFFFFFFFu)
#define portYIELD_FROM_ISR(woken) ((void)(woken))
