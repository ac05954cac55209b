"""Parallel CPU kernels over host-resident training state.

BF16 arrays are numpy ``uint16`` bit images, because numpy has no BF16. Offsets and lengths of
gradients and optimizer state are multiples of 64 elements (callers pad). Importing compiles
nothing: the first call with a new dtype does (about 1 s), and Numba caches the result on disk.

Every result is bit-identical for any thread count, and ``adamw_update`` also for any chunking:

- No fast-math flag is set. With ``contract``, LLVM may fuse ``a*b + c*d`` one way in a vector body
  and the other in its scalar remainder, so a value would depend on where its chunk ends. The
  kernels wait for DRAM, so fused multiply-adds would buy nothing.
- Threads share out whole blocks of ``_BLOCK`` elements counted from the start of the array, and a
  sum over an array is built from one FP64 partial per block, combined in block order.

``error_model="numpy"`` drops the zero-division check, which would keep loops from vectorizing.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload
from numpy.typing import DTypeLike

LINE = 64
"""Bytes of a cache line."""
_BLOCK = 1024  # 18 KB for the five arrays of one AdamW block: half the first-level cache
_RUN = 16  # blocks that a thread takes at a time: 0.1 ms of an update
_SUM_LANES = 64  # running sums per block: fixed here, so no vector width can change the result

_inline = numba.njit(nogil=True, error_model="numpy")
_parallel = numba.njit(parallel=True, nogil=True, cache=True, error_model="numpy")


def set_threads(n: int) -> None:
    """Use ``n`` threads, or all there are, in kernels called from this Python thread (others keep their own
    count)."""
    numba.set_num_threads(min(n, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


@_inline
def _blocks(a):
    return (a.size + _BLOCK - 1) // _BLOCK


@_inline
def _block(a, k):
    return a[k * _BLOCK : (k + 1) * _BLOCK]


# --- BF16 ----------------------------------------------------------------------------------------


@_inline
def _round_bf16(x):
    """FP32 -> BF16 bits, round to nearest even. Rounding up could carry a NaN into inf or zero."""
    u = np.float32(x).view(np.uint32)
    rounded = np.uint16((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> 16)
    return rounded if x == x else np.uint16(0x7FC0)


def _load(x):
    """A stored element, FP32 or BF16 bits, as FP32."""


@overload(_load)
def _(x):
    if x == numba.float32:
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def _stored(x, a):
    """FP32 ``x`` as array ``a`` stores it: FP32 or BF16 bits."""


@overload(_stored)
def _(x, a):
    return (lambda x, a: x) if a.dtype == numba.float32 else (lambda x, a: _round_bf16(x))


@_parallel
def _to_bf16(src, dst):
    for k in prange(_blocks(src)):
        s, d = _block(src, k), _block(dst, k)
        for i in range(s.size):
            d[i] = _round_bf16(s[i])


def to_bf16(src: np.ndarray, dst: np.ndarray) -> None:
    """Round FP32 ``src[n]`` to nearest even into BF16 bits ``dst[n]``; any NaN becomes 0x7FC0."""
    _check(src, "src", np.float32, multiple=1)
    _check(dst, "dst", np.uint16, src.size, multiple=1)
    _to_bf16(src, dst)


# --- gradients -----------------------------------------------------------------------------------


@_inline
def _sum_block(landing, first, lane_stride, lanes, total):
    """``total[:] = ((g0 + g1) + g2) + ...`` in FP32, where g_r starts at first + r*lane_stride."""
    lane = landing[first : first + total.size]
    for i in range(total.size):
        total[i] = _load(lane[i])
    for r in range(1, lanes):
        lane = landing[first + r * lane_stride : first + r * lane_stride + total.size]
        for i in range(total.size):
            total[i] += _load(lane[i])


@_inline
def _square_block(x, sums):
    """Sum of squares of one block in FP64; ``sums`` holds the running sums."""
    sums[:] = 0.0
    rows = x.reshape(x.size // _SUM_LANES, _SUM_LANES)  # x[row + j] would compile to gathers
    for row in range(rows.shape[0]):
        for j in range(_SUM_LANES):
            value = np.float64(_load(rows[row, j]))
            sums[j] += value * value
    total = 0.0
    for j in range(_SUM_LANES):
        total += sums[j]
    return total


@_inline
def _in_order(partial):
    """Plain serial sum: ``partial.sum()`` in a parallel kernel would depend on the threads."""
    total = 0.0
    for k in range(partial.size):
        total += partial[k]
    return total


@_parallel
def _sum_lanes(landing, offset, lane_stride, lanes, out):
    partial = np.empty(_blocks(out), np.float64)
    for k in prange(partial.size):
        o = _block(out, k)
        total, sums = np.empty(_BLOCK, np.float32)[: o.size], np.empty(_SUM_LANES, np.float64)
        _sum_block(landing, offset + k * _BLOCK, lane_stride, lanes, total)
        for i in range(o.size):
            o[i] = _stored(total[i], o)
        partial[k] = _square_block(o, sums)
    return _in_order(partial)


@_parallel
def _accumulate(landing, offset, lane_stride, lanes, total, first):
    partial = np.empty(_blocks(total), np.float64)
    for k in prange(partial.size):
        t = _block(total, k)
        new, sums = np.empty(_BLOCK, np.float32)[: t.size], np.empty(_SUM_LANES, np.float64)
        _sum_block(landing, offset + k * _BLOCK, lane_stride, lanes, new)
        for i in range(t.size):
            t[i] = new[i] if first else t[i] + new[i]
        partial[k] = _square_block(t, sums)
    return _in_order(partial)


def sum_lanes(landing: np.ndarray, offset: int, lane_stride: int, lanes: int, out: np.ndarray) -> float:
    """Sum the ranks' gradients into ``out[n]`` and return the sum of squares of what was stored.

    ``landing`` is the whole landing buffer, FP32 or BF16; rank r's gradient is the ``n`` elements
    at ``offset + r*lane_stride``. The sum runs in FP32 in rank order and is rounded once to
    ``out``, which has landing's dtype and may be lane 0 itself. The FP64 result is NaN or inf if
    any stored element is.
    """
    _check(out, "out", landing.dtype)
    _check_lanes(landing, offset, lane_stride, lanes, out.size)
    return _sum_lanes(landing, int(offset), int(lane_stride), int(lanes), out)


def accumulate(
    landing: np.ndarray, offset: int, lane_stride: int, lanes: int, total: np.ndarray, first: bool
) -> float:
    """Add the ranks' gradients, as ``sum_lanes`` sums them in FP32, to FP32 ``total[n]``, or replace it
    with them if they are the ``first``. Returns the sum of squares of the new total, in FP64."""
    _check(total, "total", np.float32)
    _check_lanes(landing, offset, lane_stride, lanes, total.size)
    return _accumulate(landing, int(offset), int(lane_stride), int(lanes), total, bool(first))


# --- optimizer -----------------------------------------------------------------------------------


@intrinsic
def _take(context, counter, count):
    """Adds ``count`` to the first element of int64 ``counter`` and returns what it was before, as one
    operation: no two threads get the same."""

    def generate(target, builder, signature, arguments):
        array, number = arguments
        place = target.make_array(signature.args[0])(target, builder, array).data
        return builder.atomic_rmw("add", place, number, "monotonic")

    return types.int64(counter, types.int64), generate


@_parallel
def _adamw(p, m, v, working, landing, offset, lane_stride, lanes, c, threads, taken):
    # Threads take runs of blocks until none is left. Equal shares would end with the slowest thread, which
    # whatever else runs on the machine has kept from its core.
    scale, keep, one_b1, b2, one_b2, inv_root, eps, rate = c
    blocks = _blocks(p)
    for _ in prange(threads):
        first = _take(taken, _RUN)  # type: ignore[call-arg, var-annotated]  # the compiler adds its context
        while first < blocks:
            for k in range(first, min(first + _RUN, blocks)):
                pk, mk, vk = _block(p, k), _block(m, k), _block(v, k)
                grad = np.empty(_BLOCK, np.float32)[: pk.size]
                _sum_block(landing, offset + k * _BLOCK, lane_stride, lanes, grad)
                for i in range(pk.size):
                    g = grad[i] * scale
                    mi = mk[i] + one_b1 * (g - mk[i])
                    vi = vk[i] * b2 + one_b2 * g * g
                    pk[i] = pk[i] * keep - rate * (mi / (np.sqrt(vi) * inv_root + eps))
                    mk[i], vk[i] = mi, vi
                # Its own loop: one more written array above and LLVM gives up on proving no overlap.
                if working is not None:
                    wk = _block(working, k)
                    for i in range(pk.size):
                        wk[i] = _round_bf16(pk[i])
            first = _take(taken, _RUN)


def adamw_update(
    master: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    working: np.ndarray | None,
    landing: np.ndarray,
    offset: int,
    lane_stride: int,
    lanes: int,
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One AdamW step on ``n`` parameters, in one pass over memory (28 B/parameter with BF16).

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are FP32 of length n, updated in place. ``working``
    receives the new master as BF16 bits, or is None if ranks compute in FP32 and read ``master``.
    ``landing`` (FP32 or BF16) holds the ranks' gradients as in ``sum_lanes``.

    Decoupled weight decay (Loshchilov & Hutter 2019) with the operations of ``torch.optim.AdamW``,
    where t is the 1-based ``step`` and g the scaled lane sum::

        p *= 1 - lr*weight_decay
        m += (1 - beta1) * (g - m)
        v  = beta2*v + (1 - beta2)*g*g
        p -= lr/(1 - beta1**t) * m / (sqrt(v)/sqrt(1 - beta2**t) + eps)
    """
    n = master.size
    _check(master, "master", np.float32)
    _check(exp_avg, "exp_avg", np.float32, n)
    _check(exp_avg_sq, "exp_avg_sq", np.float32, n)
    if working is not None:
        _check(working, "working", np.uint16, n)
    _check_lanes(landing, offset, lane_stride, lanes, n)
    factors = adamw_factors(
        grad_scale=grad_scale, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step
    )
    c = tuple(np.float32(x) for x in factors)
    where = int(offset), int(lane_stride), int(lanes)
    threads = numba.get_num_threads()
    _adamw(master, exp_avg, exp_avg_sq, working, landing, *where, c, threads, np.zeros(1, np.int64))


def adamw_factors(
    *, grad_scale: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> tuple[float, ...]:
    """What an AdamW kernel multiplies by, computed in FP64, for it to round once: the gradient's scale,
    the decay, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2**step), eps and lr / (1 - beta1**step)."""
    root, rate = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    return grad_scale, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, 1 / root, eps, rate


# --- copying -------------------------------------------------------------------------------------


@intrinsic
def _stream_line(context, src, dst, start):
    """Sixteen FP32 elements from ``start`` on, stored past the caches: a line that is stored whole need not
    be read first, as an ordinary store does. Numba has no word for that, LLVM has."""

    def generate(target, builder, signature, arguments):
        *arrays, first = arguments
        line = ir.VectorType(ir.FloatType(), 16).as_pointer()
        source, destination = (
            builder.bitcast(builder.gep(target.make_array(kind)(target, builder, array).data, [first]), line)
            for kind, array in zip(signature.args[:2], arrays, strict=True)
        )
        store = builder.store(builder.load(source, align=4), destination, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return target.get_dummy_value()

    return types.void(src, dst, start), generate


@intrinsic
def _fence(context):
    """What was streamed is seen by whoever sees what is stored next."""

    def generate(target, builder, signature, arguments):
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), generate


@_parallel
def _copy(src, dst):
    for k in prange(_blocks(src)):
        s, d = _block(src, k), _block(dst, k)
        for start in range(0, s.size, 16):
            _stream_line(s, d, start)  # type: ignore[call-arg]  # the compiler adds its context
        _fence()  # type: ignore[call-arg]


def compile_copy() -> None:
    """Compile ``copy`` now, and not in its first call, for which an update may wait."""
    fp32 = types.Array(types.float32, 1, "C")
    _copy.compile((fp32, fp32))


def copy(src: np.ndarray, dst: np.ndarray) -> None:
    """Copy FP32 ``src[n]`` to ``dst[n]``, which starts on a cache line.

    On two cores 17 GB/s, where torch's copy, whose stores read every line first, makes 10 of the same
    bandwidth.
    """
    _check(src, "src", np.float32)
    _check(dst, "dst", np.float32, src.size)
    if dst.ctypes.data % LINE:
        raise ValueError(f"dst must start on a multiple of {LINE} bytes, not at {dst.ctypes.data:#x}")
    _copy(src, dst)


# --- filling -------------------------------------------------------------------------------------


@_parallel
def _fill(out, value):
    for k in prange(_blocks(out)):
        o = _block(out, k)
        for i in range(o.size):
            o[i] = _stored(value, o)


def fill(out: np.ndarray, value: float) -> None:
    """Set every element of ``out[n]`` (FP32 or BF16) to ``value``.

    Fresh memory is mapped by the threads together, which is several times faster than by one.
    """
    _check(out, "out", out.dtype, multiple=1)
    _fill(out, np.float32(value))


@_inline
def _mix(x):
    """The output function of SplitMix64 (Steele, Lea & Flood 2014): a bijection on 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_CELLS = 2**16


@cache
def _quantiles() -> np.ndarray:
    """Of the normal distribution, at 2**16 + 1 even steps of probability: +-4.3 at the ends."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((k + 0.5) / (_CELLS + 1)) for k in range(_CELLS + 1)], np.float32)


@_parallel
def _fill_normal(out, std, seed, stream, table):
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix(_mix(seed + golden) + stream * golden)
    for k in prange(_blocks(out)):
        o = _block(out, k)
        for i in range(o.size):
            bits = _mix(key + np.uint64((k * _BLOCK + i) // 2 + 1) * golden)
            half = np.uint32(bits >> np.uint64(32)) if i % 2 else np.uint32(bits & np.uint64(0xFFFFFFFF))
            cell = half >> np.uint32(16)
            low, high = table[cell], table[cell + 1]
            part = np.float32(half & np.uint32(0xFFFF)) * np.float32(2.0**-16)
            o[i] = std * (low + part * (high - low))


def fill_normal(out: np.ndarray, std: float, seed: int, stream: int) -> None:
    """Fill FP32 ``out[n]`` with N(0, std**2), cut off at 4.3 std: a function of (seed, stream, index).

    Counter-based SplitMix64 picks a place between two of 2**16 quantiles; different streams (one per
    parameter) are independent. Ten times as fast as Box-Muller, which a large model waits for.
    """
    _check(out, "out", np.float32, multiple=1)
    _fill_normal(out, np.float32(std), np.uint64(seed), np.uint64(stream), _quantiles())


# --- checks --------------------------------------------------------------------------------------


def _check(a: np.ndarray, name: str, dtype: DTypeLike, n: int | None = None, multiple: int = 64) -> None:
    if a.dtype != dtype or a.dtype not in (np.float32, np.uint16):
        raise ValueError(f"{name}: dtype {a.dtype}, expected {np.dtype(dtype)}")
    if a.ndim != 1 or not a.flags.c_contiguous:
        raise ValueError(f"{name}: must be 1-D and contiguous")
    if a.size % multiple or n not in (None, a.size):
        raise ValueError(f"{name}: {a.size} elements, expected {n or f'a multiple of {multiple}'}")


def _check_lanes(landing: np.ndarray, offset: int, lane_stride: int, lanes: int, n: int) -> None:
    _check(landing, "landing", landing.dtype)
    if lanes < 1 or min(offset, lane_stride) < 0 or offset % 64 or lane_stride % 64:
        raise ValueError(f"{lanes} lanes at {offset} + r*{lane_stride}: not multiples of 64")
    if lanes > 1 and lane_stride < n:
        raise ValueError(f"lanes of {n} elements overlap at stride {lane_stride}")
    if offset + (lanes - 1) * lane_stride + n > landing.size:
        raise ValueError(f"lanes of {n} elements end beyond the landing buffer ({landing.size})")
