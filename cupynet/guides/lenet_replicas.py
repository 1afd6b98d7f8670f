"""LeNet on two replicas: parameter averaging without a trainer, a wrapper or a configuration.

    python -m cupynet.guides.lenet_replicas

Each worker runs `train` in its own thread. `Trainer.fit` is this loop with checkpoints, callbacks and evaluation.
"""

from __future__ import annotations

import numpy as np

from cupynet import Conv2D, Dense, Image, Loader, MaxPool2D, Model, Nesterov, Sequential, Synthetic
from cupynet.backend import create_backend, device_count
from cupynet.nn import Context
from cupynet.parallel import Communicator, ThreadLauncher

WORKERS, EPOCHS, AVERAGING_FREQUENCY = 2, 3, 3
LENET = {
    "conv1": Conv2D(filters=20, kernel_size=5),
    "pool1": MaxPool2D(kernel_size=2),
    "conv2": Conv2D(filters=50, kernel_size=5),
    "pool2": MaxPool2D(kernel_size=2),
    "dense1": Dense(units=500, activation="relu"),
    "output": Dense(units=10),
}


def train(world: Communicator, backend_name: str = "numba", digits: int = 4000) -> float:
    """Train this worker's replica; return its accuracy, which is the same on all workers."""
    backend = create_backend(backend_name, device=world.rank % max(1, device_count(backend_name)))
    backend.activate()
    world.attach(backend)
    data = Synthetic(train=digits, test=digits // 8).load()
    loader = Loader(data.train, batch_size=32, seed=12345)
    model = Model(Sequential(LENET), Image(28, 28, 1), backend, seed=123)  # the same weights on every worker
    optimizer = Nesterov(learning_rate=0.01, momentum=0.9)
    optimizer.init(model.params, backend)

    iteration = samples = 0
    for epoch in range(EPOCHS):
        batches = loader.epoch(epoch, backend, world.rank, world.size)  # worker r takes batches r, r + 2, r + 4, ...
        for _ in range(loader.iterations(world.size)):
            batch = next(batches, None)  # in the last iteration some workers may have none
            if batch is not None:
                context = Context(train=True, epoch=epoch, iteration=iteration, samples=batch.samples, seed=model.seed)
                logits, backward = model.forward(batch.images, context)
                _, gradient = model.loss(backend, logits, batch.labels)
                backward(gradient)
                optimizer.step(model.params, iteration)
                samples += len(batch)
            iteration += 1
            last = iteration == EPOCHS * loader.iterations(world.size)
            if iteration % AVERAGING_FREQUENCY == 0 or last:  # all workers average in the same iteration
                world.allreduce_mean([*model.params.vectors, *optimizer.state.values()], weight=samples)
                samples = 0

    images, labels = data.test.images, data.test.labels
    return float(np.mean(model.predict(images).argmax(axis=1) == labels))


def main(backend_name: str = "numba", digits: int = 4000) -> float:
    """Train two replicas and return the accuracy of their average, from 0 to 1."""
    with ThreadLauncher(WORKERS) as launcher:
        accuracy = launcher.run(lambda world: train(world, backend_name, digits))
    assert accuracy is not None
    return accuracy


if __name__ == "__main__":
    print(f"accuracy of the average: {main():.2%}")
