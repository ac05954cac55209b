"""Properties of the host kernels that training relies on."""

import itertools
import platform

import numba
import numpy as np
import pytest
import torch

from slidedp.host import kernels

HYPER = {"grad_scale": 0.25, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
N = 64 * 257  # not a multiple of the kernels' block


@pytest.fixture(autouse=True)
def _restore_threads():
    before = numba.get_num_threads()
    yield
    kernels.set_threads(before)


def normal(n, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def bf16(x):
    out = np.empty(x.size, np.uint16)
    kernels.to_bf16(x, out)
    return out


def as_torch(x):
    """A tensor over ``x``; uint16 is read as BF16."""
    return torch.from_numpy(x) if x.dtype == np.float32 else torch.from_numpy(x).view(torch.bfloat16)


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("to_dtype", [np.copy, bf16], ids=["fp32", "bf16"])
def test_adamw_is_bit_identical_for_any_chunking_and_thread_count(to_dtype):
    lanes, stride, first = 3, N + 128, 64
    landing = to_dtype(normal(first + lanes * stride, seed=1))

    def run(chunks, threads):
        kernels.set_threads(threads)
        p, m, v, w = normal(N), np.zeros(N, np.float32), np.zeros(N, np.float32), bf16(normal(N))
        for step in (1, 2, 3):
            for a, b in chunks:
                state = p[a:b], m[a:b], v[a:b], w[a:b]
                where = landing, first + a, stride, lanes
                kernels.adamw_update(*state, *where, **HYPER, weight_decay=0.1, step=step)
        return np.concatenate([p, m, v, w.astype(np.float32)])

    whole = run([(0, N)], 1)
    cuts = [0, 64, 192, 2048, 2112, 6976, N]
    assert same_bits(whole, run([(0, N)], 2))
    assert same_bits(whole, run(list(itertools.pairwise(cuts)), 2))
    assert same_bits(whole, run([(a, a + 64) for a in range(0, N, 64)], 1))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lanes", [1, 4])
def test_adamw_matches_torch_over_20_steps(weight_decay, lanes):
    p, m, v = normal(N), np.zeros(N, np.float32), np.zeros(N, np.float32)
    # In FP64: torch 2.13's own step in FP32 is off by 3e-6 on a second thread, in one process of ten.
    ref = torch.nn.Parameter(torch.from_numpy(p).double())
    hyper = {k: HYPER[k] for k in ("lr", "eps")} | {"weight_decay": weight_decay}
    opt = torch.optim.AdamW([ref], betas=(HYPER["beta1"], HYPER["beta2"]), **hyper)
    for step in range(1, 21):
        landing = normal(lanes * N, seed=step, scale=10.0 ** (step % 3 - 2))
        kernels.adamw_update(
            p, m, v, None, landing, 0, N, lanes, **HYPER, weight_decay=weight_decay, step=step
        )
        ref.grad = torch.from_numpy(landing).double().view(lanes, N).sum(0) * HYPER["grad_scale"]
        opt.step()
    state = opt.state[ref]
    for ours, theirs in ((p, ref.data), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-6)


def test_adamw_rounds_every_operation_to_fp32():
    """NumPy never fuses a multiply into an add, so neither may the kernel: no bit may differ."""
    p, m, v, grad = normal(N, 1), normal(N, 2, 0.1), np.square(normal(N, 3)), normal(N, 4)
    b1, b2, lr, eps = HYPER["beta1"], HYPER["beta2"], HYPER["lr"], HYPER["eps"]
    f32, step = np.float32, 5
    g = grad * f32(HYPER["grad_scale"])
    new_m = m + f32(1 - b1) * (g - m)
    new_v = v * f32(b2) + f32(1 - b2) * g * g
    denominator = np.sqrt(new_v) * f32(1 / np.sqrt(1 - b2**step)) + f32(eps)
    new_p = p * f32(1 - lr * 0.1) - f32(lr / (1 - b1**step)) * (new_m / denominator)
    kernels.adamw_update(p, m, v, None, grad, 0, N, 1, **HYPER, weight_decay=0.1, step=step)
    assert same_bits(m, new_m) and same_bits(v, new_v) and same_bits(p, new_p)


def test_adamw_writes_the_working_copy_of_the_new_master():
    p, m, v, w = normal(N), np.zeros(N, np.float32), np.zeros(N, np.float32), bf16(normal(N))
    kernels.adamw_update(p, m, v, w, bf16(normal(N)), 0, N, 1, **HYPER, weight_decay=0.1, step=1)
    assert torch.equal(as_torch(w), torch.from_numpy(p).bfloat16())


def test_bf16_rounding_equals_torch_bit_for_bit():
    high = np.arange(1 << 16, dtype=np.uint32) << 16  # every BF16, then what lies beside and between
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (high[:, None] | low).ravel().view(np.float32)
    ours, theirs = as_torch(bf16(x)), torch.from_numpy(x).bfloat16()
    nan = torch.from_numpy(np.isnan(x))
    assert torch.equal(ours.isnan(), nan)  # torch itself writes NaN as 0x7FC0 or 0xFFFF
    assert torch.equal(ours.view(torch.int16)[~nan], theirs.view(torch.int16)[~nan])


@pytest.mark.parametrize("to_dtype", [np.copy, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_sum_lanes_equals_the_sequential_fp32_sum(to_dtype, lanes):
    first, stride = 128, N + 64
    landing = to_dtype(normal(first + lanes * stride, seed=2))
    parts = [as_torch(landing[first + r * stride :][:N]).float() for r in range(lanes)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    expected = expected.to(as_torch(landing).dtype)

    out = np.empty(N, landing.dtype)
    squares = []
    for threads in (1, 2):
        kernels.set_threads(threads)
        squares.append(kernels.sum_lanes(landing, first, stride, lanes, out))
        assert torch.equal(as_torch(out), expected)
    assert squares[0] == squares[1] == pytest.approx(as_torch(out).double().square().sum().item(), rel=1e-12)

    in_place = landing[first : first + N]
    assert kernels.sum_lanes(landing, first, stride, lanes, in_place) == squares[0]
    assert same_bits(in_place, out)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("to_dtype", [np.copy, bf16], ids=["fp32", "bf16"])
def test_non_finite_gradients_show_in_the_sum_of_squares(to_dtype, bad):
    x = normal(2 * N)
    x[N + 5000] = bad
    landing = to_dtype(x)
    assert not np.isfinite(kernels.sum_lanes(landing, 0, N, 2, np.empty(N, landing.dtype)))


@pytest.mark.parametrize("to_dtype", [np.copy, bf16], ids=["fp32", "bf16"])
def test_sum_of_squares_is_accurate_and_independent_of_threads(to_dtype):
    x = to_dtype(normal(10_000_000, seed=3))
    exact = np.square(as_torch(x).double().numpy()).sum()
    kernels.set_threads(1)
    one = kernels.sum_lanes(x, 0, 0, 1, x)
    kernels.set_threads(2)
    assert kernels.sum_lanes(x, 0, 0, 1, x) == one == pytest.approx(exact, rel=1e-12)


def test_fill_normal_statistics_and_determinism():
    n, std = 1_000_001, 0.02

    def draw(seed, stream, threads=2, n=n):
        out = np.full(n, np.nan, np.float32)
        kernels.set_threads(threads)
        kernels.fill_normal(out, std, seed, stream)
        return out

    base = draw(1, 0)
    assert same_bits(base, draw(1, 0, threads=1))
    assert same_bits(base[:77], draw(1, 0, n=77))
    z = base.astype(np.float64) / std
    assert abs(z.mean()) < 4 / n**0.5
    assert abs(z.std() - 1) < 4 / (2 * n) ** 0.5
    assert abs((z**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert 4.3 < abs(z).max() < 6.7
    for lag in (1, 2, 2048):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 4 / n**0.5
    for other in (draw(1, 1), draw(2, 0), draw(0, 1)):
        assert abs(np.corrcoef(z, other)[0, 1]) < 4 / n**0.5
        assert abs(np.corrcoef(z**2, np.square(other))[0, 1]) < 4 / n**0.5


def test_fill_writes_numbers_not_bits():
    for dtype in (np.float32, np.uint16):
        out = np.zeros(4099, dtype)
        kernels.fill(out, 1.5)
        assert (as_torch(out) == 1.5).all()


def on_a_line(n, beside=0):
    """FP32 zeros that start `beside` elements behind the start of a cache line."""
    raw = np.zeros(4 * n + 2 * kernels.LINE, np.uint8)
    start = -raw.ctypes.data % kernels.LINE + 4 * beside
    return raw[start : start + 4 * n].view(np.float32)


def test_copy_copies_all_and_nothing_else():
    for source in (normal(N), on_a_line(N, beside=1)):
        source[:] = normal(N, seed=3)
        whole = on_a_line(N + 64)
        kernels.copy(source, whole[:N])
        assert same_bits(whole[:N], source) and not whole[N:].any()
    with pytest.raises(ValueError, match="multiple of 64 bytes"):
        kernels.copy(normal(N), on_a_line(N, beside=1))


def test_copy_is_compiled_before_its_first_call(monkeypatch):
    fresh = numba.njit(parallel=True)(kernels._copy.py_func)
    monkeypatch.setattr(kernels, "_copy", fresh)
    kernels.compile_copy()
    assert len(fresh.signatures) == 1
    kernels.copy(normal(N), on_a_line(N))
    assert len(fresh.signatures) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an instruction of x86-64")
def test_copy_stores_past_the_caches():
    compiled = numba.njit(parallel=True)(kernels._copy.py_func)  # what a disk has cached is not shown
    compiled(normal(N), on_a_line(N))
    assert any("movntps" in code for code in compiled.inspect_asm().values())


def test_wrong_shapes_are_rejected_before_memory_is_touched():
    p, m, v, landing = (normal(n) for n in (128, 128, 128, 256))
    rest = HYPER | {"weight_decay": 0.0, "step": 1}
    for offset, stride, lanes in (
        (32, 128, 1),
        (0, 64, 2),
        (64, 128, 2),
        (192, 128, 1),
        (-64, 0, 1),
    ):
        with pytest.raises(ValueError, match="lanes"):
            kernels.adamw_update(p, m, v, None, landing, offset, stride, lanes, **rest)
    with pytest.raises(ValueError, match="exp_avg: 64 elements, expected 128"):
        kernels.adamw_update(p, m[:64], v, None, landing, 0, 128, 1, **rest)
    with pytest.raises(ValueError, match="multiple of 64"):
        kernels.sum_lanes(p, 0, 0, 1, p[:100])
    with pytest.raises(ValueError, match="dtype"):
        kernels.sum_lanes(landing, 0, 128, 2, np.empty(128, np.uint16))
