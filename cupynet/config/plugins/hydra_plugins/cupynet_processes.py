"""The launcher of cupynet, where Hydra looks for plugins: in the namespace package `hydra_plugins`."""

from cupynet.config.process_launcher import ProcessLauncher


class Processes(ProcessLauncher):
    """`hydra/launcher=processes`."""
