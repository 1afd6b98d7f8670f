"""A synchronizer: averages gradients in every iteration, so that all replicas stay equal."""

from cupynet import Synchronizer


class GradientMean(Synchronizer):
    """Averages gradients and running statistics over all replicas, weighted by samples."""

    def before_update(self, replica, samples):
        self.communicator.allreduce_mean([replica.params.grad, *replica.params.running], samples)
