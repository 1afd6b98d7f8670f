"""The workspaces of worker threads and what they have on loan."""

from cupynet.backend import Workspace
from cupynet.training import ParallelWrapper


def workspaces(wrapper: ParallelWrapper) -> list[Workspace]:
    found: dict[int, Workspace] = {}
    wrapper.on_workers(lambda trainer: found.update({trainer.rank: trainer.backend.workspace}))
    return [found[rank] for rank in sorted(found)]


def on_loan(wrapper: ParallelWrapper) -> list[int]:
    """Count the buffers each worker has on loan, in rank order; zeros between tasks."""
    return [workspace.on_loan for workspace in workspaces(wrapper)]
