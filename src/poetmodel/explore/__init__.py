"""The explorer: a local page on which one drags the budget and sees the schedule change."""
