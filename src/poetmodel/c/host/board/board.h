#ifndef BOARD_H
#define BOARD_H

/* Fills the unused stack, so that pm_print_figures can measure how much of it was used. */
void board_paint_stack(void);

#endif
