"""A learning-rate schedule that falls repeatedly."""

from cupynet.optim import Schedule


class Saw(Schedule):
    """Falls linearly from `peak` to almost 0, and starts again after `every` iterations."""

    def __init__(self, peak, every):
        self.peak, self.every = peak, every

    def __call__(self, iteration):
        return self.peak * (1 - iteration % self.every / self.every)
