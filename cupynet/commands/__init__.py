"""The commands. Each module has a function `main`."""
