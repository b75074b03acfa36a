"""The explorer: a local page that shows the schedule for limits set by sliders."""
