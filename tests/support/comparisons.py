"""Compare each public operation of a backend with the reference, on random arguments with odd shapes.

The reference is the base class on NumPy. Values are compared with its results in double on the same numbers, shapes and
dtypes with those in the same precision. Each function here draws arguments from a `Call`, uses the operation that it is
named after, and returns the arrays to compare. tests/backend/test_operations.py fails if an operation has no function.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend import RULES, Backend, Convolution, DtypePolicy, PixelScale, UpdateScalars, Window
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.reference.activation import NAMES, OF_INPUT
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.backend.workspace import Workspace
from tests.support.arguments import HALVING as HALVING
from tests.support.arguments import Call, Shape, channels_of, grouped, layers_of, pools_of, targets, terms_of

Array: TypeAlias = Any
Results: TypeAlias = dict[str, Array]


def in_place(backend: Backend, found: Array, given: Array) -> Array:
    """Return an operation's result after checking that it uses its argument's memory."""
    assert backend.data_ptr(found) == backend.data_ptr(given), "not in place"
    return found


def load_images(backend: Backend, call: Call, shape: Shape) -> Results:
    images, channels = call.rng.integers(0, 256, (7, *shape.image[1:]), np.uint8), shape.image[3]
    samples = call.rng.integers(0, 7, shape.batch)
    each = PixelScale.of(call.rng.uniform(0.1, 0.9, channels).tolist(), call.rng.uniform(0.2, 0.4, channels).tolist())
    return {
        "y": backend.load_images(images, samples),
        "one": backend.load_images(images, samples, PixelScale.of([0.5], [0.25])),
        "each": backend.load_images(images, samples, each),
    }


def matmul(backend: Backend, call: Call, shape: Shape) -> Results:
    rows, inner, cols = shape.batch * shape.height, shape.width * shape.channels, shape.outputs
    a = call.stored(rows, inner)
    b = call.stored(*((cols, inner) if shape.flag else (inner, cols)))
    return {"y": backend.matmul(a, b, transpose_b=shape.flag)}


def dense(backend: Backend, call: Call, shape: Shape) -> Results:
    features = shape.height * shape.channels
    x, weight = call.stored(shape.batch, features), call.stored(features, shape.outputs)
    bias = call.stored(shape.outputs) if shape.flag else None
    return {"y": backend.dense(x, weight, bias, relu=shape.need_dx)}


def dense_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    features = shape.height * shape.channels
    x, weight, relu = call.stored(shape.batch, features), call.stored(features, shape.outputs), shape.height > 1
    dy = call.stored(shape.batch, shape.outputs, changes=relu)
    weight_grad, bias_grad = call.wide(features, shape.outputs), call.wide(shape.outputs) if shape.flag else None
    relu_y = call.few(*dy.shape) if relu else None
    dx = backend.dense_backward(dy, x, weight, weight_grad, bias_grad, need_dx=shape.need_dx, relu_y=relu_y)
    return {"dx": dx, "weight_grad": weight_grad, "bias_grad": bias_grad}


def im2col(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"columns": backend.im2col(call.stored(*shape.image), shape.window)}


def col2im(backend: Backend, call: Call, shape: Shape) -> Results:
    size = backend.im2col(call.stored(*shape.image), shape.window).shape
    columns = backend.asarray(call.rng.normal(size=size).astype(call.drawn.storage).astype(backend.policy.compute))
    return {"dx": backend.col2im(columns, shape.image, shape.window)}


def conv2d(backend: Backend, call: Call, shape: Shape) -> Results:
    found: Results = {}
    for way, groups, image, sizes in grouped(shape):
        x, weight = call.stored(*image), call.stored(*sizes)
        bias = call.stored(sizes[3]) if shape.flag else None
        found[way], _ = backend.conv2d(x, weight, bias, shape.window, groups=groups, relu=shape.need_dx)
    return found


def conv2d_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    found: Results = {}
    for way, groups, image, sizes in grouped(shape):
        x, weight = call.stored(*image), call.stored(*sizes)
        y, kept = backend.conv2d(x, weight, None, shape.window, groups=groups)
        relu = shape.batch > 1
        dy, relu_y = call.stored(*y.shape, changes=relu), call.few(*y.shape) if relu else None
        weight_grad, bias_grad = call.wide(*sizes), call.wide(sizes[3]) if shape.flag else None
        options: dict[str, Any] = {"need_dx": shape.need_dx, "groups": groups, "relu_y": relu_y}
        dx = backend.conv2d_backward(dy, kept, x, weight, weight_grad, bias_grad, shape.window, **options)
        found |= {f"{way}: dx": dx, f"{way}: weight_grad": weight_grad, f"{way}: bias_grad": bias_grad}
    return found


def max_pool2d(backend: Backend, call: Call, shape: Shape) -> Results:
    window, size = shape.pooled
    x = call.few(*size) if shape.flag else call.stored(*size)
    if shape.need_dx:
        call.spoil(x)
    y, indices = backend.max_pool2d(x, window)
    return {"y": y, "indices": indices}


def max_pool2d_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    window, size = shape.pooled
    x = call.few(*size) if shape.flag else call.stored(*size)
    y, indices = backend.max_pool2d(x, window)
    dy = call.stored(*y.shape)
    if shape.need_dx:
        call.spoil(dy)
    return {"dx": backend.max_pool2d_backward(dy, indices, size, window)}


def avg_pool2d(backend: Backend, call: Call, shape: Shape) -> Results:
    window, size = shape.pooled
    return {"y": backend.avg_pool2d(call.stored(*size), window)}


def avg_pool2d_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    window, size = shape.pooled
    dy = call.stored(size[0], *window.output(*size[1:3]), size[3])
    return {"dx": backend.avg_pool2d_backward(dy, size, window)}


def fused_pair(backend: Backend, call: Call, shape: Shape) -> Results:
    """Run all pairs forward, then backward, each as one operation if the backend supports that, otherwise as two."""
    found: Results = {}
    for activation in ("identity", "relu"):
        for pool in pools_of(call, shape):
            pair = convolution_and_max_pool(backend, call, shape, activation, pool)
            found |= {f"{activation}, {pool}: {name}": array for name, array in pair.items()}
    return found


def convolution_and_max_pool(backend: Backend, call: Call, shape: Shape, activation: str, pool: Window) -> Results:
    """Run a pair on small integers. Every precision is then exact, so all backends agree on the maxima, including ties.

    With many channels, draw normal numbers without ties, because Winograd's algorithm rounds.
    """
    draw = call.few if shape.channels < 16 else call.stored
    x, weight = draw(*shape.image), draw(*shape.window.kernel, shape.channels, shape.outputs)
    bias = call.few(shape.outputs) if shape.flag else None
    convolution = Convolution(x.shape[1:], shape.outputs, shape.window, activation)
    pair, relu = backend.fused_pair(convolution, pool), activation == "relu"
    if pair is None:
        middle, columns = backend.conv2d(x, weight, bias, shape.window)
        y, indices = backend.max_pool2d(middle, pool)
        kept: tuple[Array, ...] = (middle, columns, indices)
    else:
        y, kept = pair.forward(x, (weight, bias))
    apart = relu and not (pair is not None and pair.activates)
    if apart:
        y = backend.relu(y)
    given = call.stored(*y.shape)
    dy = backend.borrow(y.shape)
    dy[...] = given
    if apart:
        dy = backend.relu_backward(dy, y)
    weight_grad, bias_grad = call.wide(*weight.shape), call.wide(shape.outputs) if shape.flag else None
    if pair is None:
        through = backend.max_pool2d_backward(dy, indices, middle.shape, pool)
        grads = weight_grad, bias_grad
        dx = backend.conv2d_backward(through, columns, x, weight, *grads, shape.window, need_dx=shape.need_dx)
    else:
        dx = pair.backward(dy, kept, x, (weight, bias), (weight_grad, bias_grad), need_dx=shape.need_dx)
    return {"y": y, "dx": dx, "weight_grad": weight_grad, "bias_grad": bias_grad}


def add(backend: Backend, call: Call, shape: Shape) -> Results:
    a, b = call.stored(*shape.image, changes=True), call.stored(*shape.image)
    total = backend.add(a, b, backend.borrow(a.shape))
    assert backend.add(a, b, a) is a
    return {"sum": total, "in place": a}


def relu(backend: Backend, call: Call, shape: Shape) -> Results:
    x = call.stored(*shape.image, changes=True)
    return {"y": in_place(backend, backend.relu(x), x)}


def relu_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    dy, y = call.stored(*shape.image, changes=True), call.few(*shape.image)
    if shape.need_dx:
        call.spoil(dy)
    return {"dx": in_place(backend, backend.relu_backward(dy, y), dy)}


def softmax(backend: Backend, call: Call, shape: Shape) -> Results:
    x = call.stored(*(shape.image if shape.flag else (shape.batch, shape.outputs)), changes=True)
    return {"y": in_place(backend, backend.softmax(x), x)}


def softmax_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    size = shape.image if shape.flag else (shape.batch, shape.outputs)
    dy, y = call.stored(*size, changes=True), call.stored(*size)
    return {"dx": in_place(backend, backend.softmax_backward(dy, y), dy)}


def pointwise(backend: Backend, call: Call, shape: Shape) -> Results:
    """Apply each activation, in place or not, to numbers near zero and far from it."""
    found: Results = {}
    for name in NAMES:
        x, far = call.stored(*shape.image, changes=shape.flag), call.few(*shape.image)
        if not shape.flag:
            x = x * (1 + 50 * far)  # within the range of half, but exp overflows
        out = x if shape.flag else backend.borrow(x.shape)
        found[name] = backend.pointwise(name, x, out, 0.25)
        assert backend.data_ptr(out) == backend.data_ptr(found[name]), "not written to `out`"
    return found


def pointwise_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    found: Results = {}
    for name in NAMES:
        dy, kept = (call.stored(*shape.image, changes=True) for _ in range(2))
        if name not in OF_INPUT:  # a possible y
            backend.pointwise(name, kept.copy(), kept, 0.25)
        found[name] = in_place(backend, backend.pointwise_backward(name, dy, kept, 0.25), dy)
    return found


def softmax_cross_entropy(backend: Backend, call: Call, shape: Shape) -> Results:
    logits, labels = call.stored(shape.batch, shape.outputs), call.integers(0, shape.outputs, shape.batch)
    weights = tuple(0.5 * i for i in range(shape.outputs)) if shape.flag else None
    smoothing = 0.25 if shape.need_dx else 0.0
    losses, gradient = backend.softmax_cross_entropy(logits, labels, smoothing, weights)
    found = {"losses": losses.copy(), "scaled gradient": gradient}
    losses, gradient = backend.softmax_cross_entropy(logits, targets(backend, call, shape), smoothing, weights)
    return found | {"losses of targets": losses.copy(), "scaled gradient, targets": gradient}


def channel_moments(backend: Backend, call: Call, shape: Shape) -> Results:
    x = call.stored(*(shape.image if shape.flag else (shape.batch * 67, shape.channels)), changes=True)
    x += call.backend.asarray(8.0 if shape.need_dx else 0.0, x.dtype)
    moments = backend.channel_moments(x)
    assert moments.shape == (2, shape.channels)
    return {"moments": moments}


def track_moments(backend: Backend, call: Call, shape: Shape) -> Results:
    mean, variance, moments = (call.wide(*size, shape.channels) for size in ((), (), (2,)))
    backend.track_moments(mean, variance, moments, 0.75, 1.0 + shape.batch)
    return {"mean": mean, "variance": variance}


def normalize(backend: Backend, call: Call, shape: Shape) -> Results:
    x, mean, variance, scale, shift = channels_of(call, shape)
    numbers, around = (x, mean, variance, scale, shift, 0.25), call.stored(*x.shape)
    y = backend.normalize(*numbers, relu=shape.need_dx)
    return {"y": y, "sum": backend.normalize(*numbers, relu=shape.need_dx, around=around)}


def normalize_sums(backend: Backend, call: Call, shape: Shape) -> Results:
    x, mean, variance, _, _ = channels_of(call, shape)
    dy, y = call.stored(*x.shape, changes=True), call.few(*x.shape) if shape.need_dx else None
    return {"sums": backend.normalize_sums(dy, x, y, mean, variance, 0.25), "masked": dy}


def normalize_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    x, mean, variance, scale, _ = channels_of(call, shape)
    dy, sums = call.stored(*x.shape, changes=True), call.wide(2, shape.channels)
    numbers, kept, out = (x, mean, variance, scale, sums, 3.0 * len(x), 0.25), dy.copy(), backend.borrow(x.shape)
    apart = in_place(backend, backend.normalize_backward(dy, *numbers, out), out)
    assert bool((dy == kept).all()), "dy was changed"
    return {"apart": apart, "dx": in_place(backend, backend.normalize_backward(dy, *numbers), dy)}


def normalize_rows(backend: Backend, call: Call, shape: Shape) -> Results:
    columns = shape.height * shape.width * shape.channels
    vectors = call.stored(columns), call.stored(columns)
    y, moments = backend.normalize_rows(call.stored(shape.batch, columns), *vectors, 0.25)
    return {"y": y, "moments": moments}


def normalize_rows_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    rows, columns = shape.batch * (130 if shape.flag else 1), shape.height * shape.channels
    x, scale, shift = call.stored(rows, columns), call.stored(columns), call.stored(columns)
    y, moments = backend.normalize_rows(x, scale, shift, 0.25)
    dy, grads = call.stored(rows, columns, changes=True), (call.wide(columns), call.wide(columns))
    dx = backend.normalize_rows_backward(dy, x, moments, scale, *grads, need_dx=shape.need_dx)
    assert dx is None or backend.data_ptr(dx) == backend.data_ptr(dy), "not in place"
    return {"dx": dx, "scale_grad": grads[0], "shift_grad": grads[1]}


def dropout(backend: Backend, call: Call, shape: Shape) -> Results:
    """Drop values. For identical bits, scale by a power of two, or compare only which values are kept."""
    x, samples = call.stored(*shape.image, changes=True), call.integers(0, 1 << 40, shape.batch)
    if not shape.need_dx:
        call.spoil(x)
    key, epoch = call.integers_on_host(1 << 62) * 3, call.integers_on_host(1 << 31)
    given = backend.asarray(np.full(1, epoch)) if shape.flag else epoch
    halved = backend.dropout(x, samples, given, key, 0.5)
    drawn = backend.dropout(call.few(*shape.image) * 0 + 1, samples, given, key, 0.3)
    kept = (drawn != 0).astype(np.int64)
    assert backend.dropout(x, samples, given, key, 0.25, x) is x
    return {"halved": halved, "kept": kept, "in place": (x != 0).astype(np.int64)}


def target_loss(backend: Backend, call: Call, shape: Shape) -> Results:
    found: Results = {}
    for kind in TARGET_LOSSES:
        prediction, labels = call.stored(shape.batch, shape.outputs), call.integers(0, shape.outputs, shape.batch)
        losses, gradient = backend.target_loss(kind, prediction, labels, 0.75)
        found |= {f"{kind} losses": losses.copy(), f"scaled gradient, {kind}": gradient}
        losses, gradient = backend.target_loss(kind, prediction, targets(backend, call, shape), 0.75)
        found |= {f"{kind} losses of targets": losses.copy(), f"scaled gradient, {kind}, targets": gradient}
    return found


def convert(backend: Backend, call: Call, shape: Shape) -> Results:
    """Convert in both directions, and within one precision."""
    stored, wide = call.stored(*shape.image), call.wide(shape.height * 16)
    widened, narrowed = backend.borrow(stored.shape, wide.dtype), backend.borrow(wide.shape)
    backend.convert(stored, widened)
    backend.convert(wide, narrowed)
    copy = backend.borrow(wide.shape, wide.dtype)
    backend.convert(wide, copy)
    return {"widened": widened, "narrowed": narrowed, "copy": copy}


def move_weights(backend: Backend, call: Call, shape: Shape) -> Results:
    """Apply every rule. Vectors are nonnegative if the rule takes their roots."""
    found: Results = {}
    for rule in RULES.values():
        weight, grad = call.wide(shape.height * 16), call.wide(shape.height * 16)
        states = [call.wide(shape.height * 16) for _ in rule.states]
        for name, state in zip(rule.states, states, strict=True):
            if name not in ("velocity", "mean"):
                backend.xp.abs(state, out=state)
        how: dict[str, Any] = {"l1": 0.02, "clip": 0.7} if shape.need_dx else {"decay": 0.05}
        if shape.batch > 1:
            how["norm"] = backend.squared_norm(grad) + 4.0, 0.5 if shape.flag else 1000.0
        move = UpdateScalars(0.1, 0.25 if shape.need_dx else 1.0, l2=0.01 if shape.flag else 0.0, **how)
        numbers, factors = (0.5, 0.25, 2.0), (0.9, 0.8, 0.01)
        stored = backend.borrow(weight.shape) if rule.moves and shape.outputs % 3 else None
        backend.move_weights(rule, weight, grad, states, replace(move, numbers=numbers, factors=factors), stored)
        vectors = {"weight": weight, "grad": grad, "stored": stored, **dict(zip(rule.states, states, strict=True))}
        found |= {f"{rule.name} {name}": vector for name, vector in vectors.items()}
    return found


def squared_norms(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"norms": backend.squared_norms(call.wide(shape.height * 500), layers_of(backend, shape))}


def clip_norms(backend: Backend, call: Call, shape: Shape) -> Results:
    grad, own = call.wide(shape.height * 500), layers_of(backend, shape)
    norms = backend.squared_norms(grad, own)
    backend.clip_norms(grad, norms, own, 10.0 if shape.flag else 1000.0)
    return {"grad": grad, "norms": norms}


def trust_weights(backend: Backend, call: Call, shape: Shape) -> Results:
    weight, grad, own = call.wide(shape.height * 500), call.wide(shape.height * 500), layers_of(backend, shape)
    stored = None
    if shape.need_dx:
        stored = backend.borrow(weight.shape)
        backend.convert(weight, stored)
    start, stop = own.bounds[-2]
    (weight if shape.flag else grad)[start:stop] = 0
    norms = backend.squared_norms(weight, own), backend.squared_norms(grad, own)
    backend.trust_weights(weight, grad, norms, own, 0.1, stored)
    return {"weight": weight, "grad": grad, "stored": stored}


def mean_in_place(backend: Backend, call: Call, shape: Shape) -> Results:
    parts, shares = terms_of(call, shape)
    on_host = [np.array(backend.to_host(part)) for part in parts]
    backend.mean_in_place(on_host, shares)
    return {f"part {r}": part for r, part in enumerate(on_host)}


def weighted_sum(backend: Backend, call: Call, shape: Shape) -> Results:
    parts, shares = terms_of(call, shape)
    out = call.wide(shape.height * 500)
    backend.weighted_sum(out, parts, shares)
    return {"sum": out}


def squared_norm(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"total": backend.asarray(backend.squared_norm(call.wide(shape.height * 16))).reshape(1)}


def total(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"total": backend.asarray(backend.total(call.wide(shape.height * 16))).reshape(1)}


def hits(backend: Backend, call: Call, shape: Shape) -> Results:
    """Count hits. The first of equal scores counts as the highest."""
    scores, labels = call.stored(shape.batch, shape.outputs), call.integers(0, shape.outputs, shape.batch)
    scores = scores * 0 if shape.flag else scores
    hits = backend.asarray(backend.hits(scores, labels)).reshape(1).copy()
    of_targets = backend.asarray(backend.hits(scores, targets(backend, call, shape))).reshape(1)
    return {"hits": hits, "hits of targets": of_targets}


def binary_hits(backend: Backend, call: Call, shape: Shape) -> Results:
    """Count binary hits. Weights in the last column have no effect."""
    logits, wanted = call.stored(shape.batch, shape.outputs), targets(backend, call, shape)
    return {"binary hits": backend.asarray(backend.binary_hits(logits, wanted)).reshape(1)}


def clip_norm(backend: Backend, call: Call, shape: Shape) -> Results:
    grad = call.wide(shape.height * 16)
    others = 4.0 if shape.need_dx else 0.0  # the squared norm of other vectors, clipped together with this one
    backend.clip_norm(grad, backend.squared_norm(grad) + others, 0.5 if shape.flag else 1000.0)
    return {"grad": grad}


COMPARISONS: dict[str, Callable[[Backend, Call, Shape], Results]] = {
    name: function for name, function in list(globals().items()) if callable(function) and hasattr(Backend, name)
}

# Operations that only move numbers, so their results equal the reference in every precision.
EXACT = {"hits", "binary_hits", "im2col", "max_pool2d", "relu", "relu_backward", "dropout"}

# Methods that are not operations on numbers. They are tested in tests/backend/test_backends.py and test_workspace.py,
# and in tests/data/test_feed.py.
ELSEWHERE = {
    "transfer", "compact", "prepare", "recorder", "deactivate", "activated", "subnormals_as_zero",
    "failure", "allocate", "allocator", "data_ptr", "asarray", "to_host", "synchronize", "activate", "borrow", "lend",
}  # fmt: skip

TOLERANCES = {"half": 4e-3, "bfloat16": 3e-2, "float": 1e-5, "double": 1e-12}


def compare(operation: str, tested: Backend, shape: Shape, seed: int) -> None:
    """Assert that a call gives the same results on the tested backend as on the reference."""
    policy = tested.policy
    results = computed(operation, tested, policy, shape, seed)
    same_precision, in_double = expected(operation, policy, shape, seed)
    tolerance = 0.0 if operation in EXACT else TOLERANCES[policy.name]
    for name, found in results.items():
        same, exact = same_precision[name], in_double[name]
        assert (found is None) == (same is None), f"{name} is missing, or unexpected"
        if found is None:
            continue
        assert (found.shape, found.dtype) == (same.shape, same.dtype), name
        values, wanted = (np.asarray(each, np.float64) for each in (found, exact))
        if name.startswith("scaled"):
            values = values / policy.loss_scale
        scale = max(1.0, float(np.nanmax(np.abs(wanted), initial=0.0)))
        np.testing.assert_allclose(values, wanted, rtol=0, atol=tolerance * scale, err_msg=name)


def computed(operation: str, backend: Backend, policy: DtypePolicy, shape: Shape, seed: int) -> Results:
    """Return the results of one call on the host; its arguments are drawn in the precision `policy`."""
    if isinstance(backend, NumpyBackend):
        backend.workspace.borrow = partial(borrow_nan, backend.workspace)  # type: ignore[method-assign]
    call = Call(seed, policy, backend)
    found = COMPARISONS[operation](backend, call, shape)
    call.check_arguments()
    results = {name: None if a is None else np.array(backend.to_host(a)) for name, a in found.items()}
    del found
    assert backend.workspace.on_loan == 0, "a borrowed array is kept"
    return results


def borrow_nan(workspace: Workspace, shape: tuple[int, ...], dtype: Any) -> Array:
    """Borrow an array full of NaN (in every precision), so that unwritten results are detected."""
    array = Workspace.borrow(workspace, shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 255
    return array


@lru_cache(maxsize=128)  # every backend makes the same calls
def expected(operation: str, policy: DtypePolicy, shape: Shape, seed: int) -> tuple[Results, Results]:
    """Return the reference's results in that precision and in double."""
    same, exact = NumpyBackend(policy.name), NumpyBackend("double")
    same.policy = policy  # may be the policy of a device that multiplies 16-bit numbers
    return computed(operation, same, policy, shape, seed), computed(operation, exact, policy, shape, seed)
