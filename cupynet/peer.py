"""PyTorch on the same network, for `cupynet.bench` to compare with: `python -m cupynet.peer --network net.json`.

The file is what `cupynet.described` makes of a model; without one it is the tutorials' LeNet with Nesterov.

With `--device cuda` on a GPU, its products in float unless `--tf32` allows TF32, with `--graph` as a CUDA graph. With
`--dtype half` or `bfloat16` as PyTorch's users have it: weights in float under autocast, with a GradScaler for half.

The only file that imports torch, run in a process of its own. Forward, backward and Nesterov update on resident data,
nothing else: no loading, no shuffling, no logging. With `--processes 2` as many processes of one thread each, which
PyTorch's own periodic averager brings together over gloo every few iterations. Prints one JSON object.
(Over 300 lines: nothing else may import torch.)
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

FUSED = ("SGD", "Adam", "AdamW")  # are one kernel on a GPU, which asks a GradScaler there whether to do anything
MEET_S = 60.0  # how long a process waits for the others
_CONV = {"stride": [1, 1], "padding": [[0, 0], [0, 0]], "dilation": [1, 1], "groups": 1, "bias": True}
_POOL = {"kind": "max_pool", "kernel": [2, 2], "stride": [2, 2], "padding": [[0, 0], [0, 0]]}
NETWORK: dict[str, Any] = {  # what is measured: see described.py
    "input": [28, 28, 1],
    "outputs": 10,
    "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9, "nesterov": True},
    "layers": [
        {"kind": "conv", "in": 1, "out": 20, "kernel": [5, 5], "activation": "identity", **_CONV},
        _POOL,
        {"kind": "conv", "in": 20, "out": 50, "kernel": [5, 5], "activation": "identity", **_CONV},
        _POOL,
        {"kind": "dense", "in": 800, "out": 500, "activation": "relu", "bias": True},
        {"kind": "dense", "in": 500, "out": 10, "activation": "identity", "bias": True},
    ],
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure PyTorch's training step.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="channels_last")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=1, help="replicas, each a process with one thread")
    parser.add_argument("--average-every", type=int, default=3, help="iterations between averages of the processes")
    parser.add_argument("--dtype", choices=["float", "half", "bfloat16"], default="float")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--number", type=int, default=0, help="of the GPU")
    parser.add_argument("--tf32", action="store_true", help="on a GPU: products of floats on tensor cores")
    parser.add_argument("--graph", action="store_true", help="on a GPU: record the step once, and replay it")
    parser.add_argument("--network", help="a JSON file that describes it; by default the tutorials' LeNet")
    arguments = parser.parse_args()
    if arguments.processes > 1 and (arguments.device == "cuda" or arguments.dtype != "float"):
        parser.error("--processes: are measured on the CPU, in float")
    if arguments.device == "cpu" and (arguments.graph or arguments.tf32):
        parser.error("--graph, --tf32: are for --device cuda")
    if arguments.network:
        with open(arguments.network, encoding="utf-8") as file:
            NETWORK.update(json.load(file))
    if arguments.processes > 1:
        period, batch = arguments.average_every, arguments.batch
        result = processes(arguments.processes, period, batch, arguments.layout, arguments.seconds)
    elif arguments.device == "cuda":
        kind = Kind(arguments.layout, arguments.dtype, arguments.number, arguments.graph, arguments.tf32)
        result = measure_on_gpu(arguments.batch, arguments.seconds, kind)
    else:
        result = measure(arguments.threads, arguments.batch, arguments.layout, arguments.seconds, arguments.dtype)
    print(json.dumps(result))


def built(layers: list[dict[str, Any]]) -> Any:
    """The layers one after the other, as a module."""
    from torch import nn

    modules: list[Any] = []
    for words in layers:
        modules += _modules(words)
    return nn.Sequential(*modules)


def _modules(words: dict[str, Any]) -> list[Any]:
    """A layer as modules."""
    from torch import nn

    kind = words["kind"]
    if kind == "residual":
        return [_branches(nn, [words["body"], words["shortcut"]], lambda parts: parts[0] + parts[1])]
    if kind == "concat":
        import torch

        return [_branches(nn, words["branches"], lambda parts: torch.cat(parts, 1))]
    if kind in ("conv", "max_pool", "avg_pool"):
        (top, bottom), (left, right) = words["padding"]
        even = top == bottom and left == right
        before = [] if even else [nn.ZeroPad2d((left, right, top, bottom))]
        size = {"kernel_size": words["kernel"], "stride": words["stride"], "padding": (top, left) if even else 0}
        if kind == "conv":
            more = {name: words[name] for name in ("dilation", "groups", "bias")}
            return [*before, nn.Conv2d(words["in"], words["out"], **size, **more), *_activation(words["activation"])]
        return [*before, nn.MaxPool2d(**size) if kind == "max_pool" else nn.AvgPool2d(**size, count_include_pad=False)]
    if kind == "dense":
        linear = nn.Linear(words["in"], words["out"], bias=words["bias"])
        return [nn.Flatten(), linear, *_activation(words["activation"])]
    if kind == "batch_norm":
        norm = nn.BatchNorm2d if words["of_images"] else nn.BatchNorm1d
        return [norm(words["channels"], eps=words["epsilon"], momentum=1 - words["momentum"])]
    if kind == "activation":
        return _activation(words["name"], words["slope"])
    if kind == "layer_norm":
        return [nn.LayerNorm(words["shape"], eps=words["epsilon"])]
    if kind == "dropout":
        return [nn.Dropout(words["rate"])]
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if kind == "global_avg_pool" else [nn.Flatten()]


def _branches(nn: Any, branches: list[list[dict[str, Any]]], join: Callable[[list[Any]], Any]) -> Any:
    class Branches(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(built(branch) for branch in branches)

        def forward(self, x: Any) -> Any:
            return join([part(x) for part in self.parts])

    return Branches()


def _activation(name: str, slope: float | None = None) -> list[Any]:
    from torch import nn

    if name == "identity":
        return []
    if name == "leaky_relu":
        return [nn.LeakyReLU(0.01 if slope is None else slope)]
    if name == "softmax":
        return [nn.Softmax(1)]
    known = {
        "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid,
        "softplus": nn.Softplus,
    }  # fmt: skip
    return [known[name]()]


def _optimizer(words: dict[str, Any], parameters: Any, device: str = "cpu", *, recorded: bool = False) -> Any:
    """In as few kernels as it can do it in there: one, or one for each of its operations over all weights.

    recorded: as part of a CUDA graph, in which an optimizer that counts its steps counts them on the device.
    """
    import torch

    arguments = {key: value for key, value in words.items() if key != "name"}
    made = getattr(torch.optim, words["name"])
    if recorded and "capturable" in inspect.signature(made).parameters:
        arguments["capturable"] = True
    arguments["fused" if device == "cuda" and words["name"] in FUSED else "foreach"] = True
    return made(parameters, **arguments)


@dataclass(frozen=True)
class Step:
    """A training step on a batch that stays where it is, in its two halves: a whole one is `clear`, and both."""

    network: Any
    clear: Callable[[], None]  # the gradients
    gradient: Callable[[], None]
    update: Callable[[], None]

    def __call__(self) -> None:
        self.clear()
        self.gradient()
        self.update()


def same_step(
    threads: int, batch: int, layout: str, device: str = "cpu", dtype: str = "float", *, recorded: bool = False
) -> Step:
    """The training step of the network; recorded: its update too becomes part of a CUDA graph."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    height, width, channels = NETWORK["input"]
    network = built(NETWORK["layers"]).to(device, memory_format=memory_format)
    optimizer = _optimizer(NETWORK["optimizer"], network.parameters(), device, recorded=recorded)
    images = torch.rand(batch, channels, height, width, device=device).to(memory_format=memory_format)
    labels = torch.randint(0, NETWORK["outputs"], (batch,), device=device)
    narrow = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    scaler = torch.amp.GradScaler(device, enabled=dtype == "half")  # (where it is not, it passes all on)

    def clear() -> None:
        optimizer.zero_grad(set_to_none=True)

    def gradient() -> None:
        with nullcontext() if dtype == "float" else torch.autocast(device, narrow):
            loss = nn.functional.cross_entropy(network(images), labels)
        scaler.scale(loss).backward()

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Step(network, clear, gradient, update)


def median_of(work: Callable[[], None], seconds: float, warm_up: int, done: Callable[[], None] | None = None) -> float:
    """The median seconds of one `work()` in `seconds` of them, after a warm-up; done: waits until it is."""
    done = done or (lambda: None)
    for _ in range(warm_up):
        work()
    done()
    times: list[float] = []
    while sum(times) < seconds:
        began = time.perf_counter()
        work()
        done()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(threads: int, batch: int, layout: str, seconds: float, dtype: str = "float") -> dict[str, object]:
    """Images per second, from the median step of `seconds` of training after a warm-up."""
    import torch

    median = median_of(same_step(threads, batch, layout, dtype=dtype), seconds, 10)
    return {"version": torch.__version__, "step_ms": median * 1e3, "images_per_s": batch / median}


@dataclass(frozen=True)
class Kind:
    """How PyTorch trains on a GPU."""

    layout: str
    dtype: str = "float"
    number: int = 0  # of the GPU
    graph: bool = False
    tf32: bool = False


def measure_on_gpu(batch: int, seconds: float, kind: Kind) -> dict[str, object]:
    """The same on a GPU; the host waits for each step, as where cupynet's is measured."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"PyTorch {torch.__version__} finds no GPU")
    torch.cuda.set_device(kind.number)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind.tf32
    whole = kind.graph and (kind.dtype != "half" or NETWORK["optimizer"]["name"] in FUSED)
    step = same_step(1, batch, kind.layout, "cuda", kind.dtype, recorded=whole)
    work = recorded_step(step, whole=whole) if kind.graph else step
    median = median_of(work, seconds, 10, torch.cuda.synchronize)
    made_with = {"version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {**made_with, "step_ms": median * 1e3, "images_per_s": batch / median}


def recorded_step(step: Step, *, whole: bool) -> Callable[[], None]:
    """The step as a CUDA graph, as PyTorch's documentation makes one: after a warm-up on another stream.

    whole: with its update, which cannot be where the host waits for what a GradScaler finds in the gradients.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # there the weights and the batch are made
    with torch.cuda.stream(side):  # what is made in the first steps must be there before anything is recorded
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    step.clear()  # the gradients are then made while it is recorded, in memory of the graph's own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.gradient()
        if whole:
            step.update()

    def replay() -> None:
        graph.replay()
        if not whole:
            step.update()

    return replay


def processes(count: int, every: int, batch: int, layout: str, seconds: float) -> dict[str, object]:
    """Images per second of `count` processes together, from the median period: `every` steps and their average."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        # the children are joined here: one that fails ends the others, and its traceback is shown
        arguments = (count, every, batch, layout, seconds, folder, NETWORK)
        torch.multiprocessing.spawn(replica, arguments, nprocs=count)
        medians = []
        for rank in range(count):
            with open(f"{folder}/{rank}", encoding="utf-8") as file:
                medians.append(float(file.read()))
    median = statistics.fmean(medians)
    return {
        "version": torch.__version__,
        "step_ms": median / every * 1e3,
        "images_per_s": count * every * batch / median,
    }


def replica(
    rank: int, count: int, every: int, batch: int, layout: str, seconds: float, folder: str, network_: dict[str, Any]
) -> None:
    """One process: trains, is averaged with the others by PyTorch, and leaves its median period in `folder`."""
    from datetime import timedelta

    import torch
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    NETWORK.update(network_)
    meeting = f"file://{folder}/meeting"
    timeout = timedelta(seconds=MEET_S)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=timeout)
    step = same_step(1, batch, layout)
    averager = PeriodicModelAverager(period=every, warmup_steps=0)

    def period() -> None:
        for _ in range(every):
            step()
            averager.average_parameters(step.network.parameters())

    for _ in range(4):
        period()
    # as many periods for each, or one would wait for another that has left
    began = time.perf_counter()
    period()
    periods = torch.tensor([max(seconds / (time.perf_counter() - began), 3.0)])
    torch.distributed.broadcast(periods, 0)
    times = []
    for _ in range(int(periods)):
        began = time.perf_counter()
        period()
        times.append(time.perf_counter() - began)
    with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
        file.write(repr(statistics.median(times)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
