"""The commands. The module of each command defines `main`."""
