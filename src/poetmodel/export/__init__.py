"""Export of training steps as C: the kernel calls of a step, and the folder that builds."""
