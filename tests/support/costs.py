"""The costs of a training round on an imaginary machine."""

from cupynet.bench.cost_model import Costs

COSTS = Costs(batch_size=128, alone_s=20e-3, busy_s=22e-3, average_s=1e-3, size=3.4e6, cores=2)
