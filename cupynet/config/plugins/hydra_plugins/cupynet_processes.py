"""The process launcher, in the namespace package in which Hydra searches for plugins."""

from cupynet.config.process_launcher import ProcessLauncher


class Processes(ProcessLauncher):
    """`hydra/launcher=processes`."""
