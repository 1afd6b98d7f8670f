"""A loss: the mean absolute error."""

from cupynet import Loss


class AbsoluteError(Loss):
    """The mean over the outputs of |z - t|. The target t is 1 for the class of the sample, otherwise 0."""

    def __call__(self, backend, prediction, target):
        difference = prediction.copy()
        difference[backend.xp.arange(len(target)), target] -= 1
        gradient = backend.xp.sign(difference) * (backend.loss_scale / difference.size)
        return abs(difference).mean(axis=1), gradient

    def scores(self, backend, prediction):
        return prediction
