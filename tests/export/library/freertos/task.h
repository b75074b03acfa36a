typedef struct task *TaskHandle_t;

void vTaskDelay(TickType_t ticks);
void vTaskDelete(TaskHandle_t task);
