"""The explorer: a local page with sliders for the limits that shows the resulting schedule."""
