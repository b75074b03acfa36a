"""Export of training steps: plan a step for a device, and write it as a folder of C."""
