#ifndef BOARD_H
#define BOARD_H

void board_paint_stack(void);

#endif
