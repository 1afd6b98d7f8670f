"""A synchronizer: gradients averaged in every iteration, so that all replicas stay one."""

from cupynet import Synchronizer


class GradientMean(Synchronizer):
    """Every replica moves along the mean gradient, weighted by samples."""

    shares_gradients = True

    def before_update(self, replica, samples):
        # called on every worker in every round: one without a batch has zero gradients and counts for nothing
        self.communicator.allreduce_mean([replica.params.grad], samples)
