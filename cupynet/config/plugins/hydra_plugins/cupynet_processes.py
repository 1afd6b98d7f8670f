"""Registers the process launcher: Hydra searches this namespace package for plugins."""

from cupynet.config.process_launcher import ProcessLauncher


class Processes(ProcessLauncher):
    """`hydra/launcher=processes`."""
