"""What resuming and data parallelism rely on in the order of samples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.data.order import Order, split

sizes = st.integers(1, 200).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))
seeds = st.integers(0, 2**32)


@given(sizes, seeds, st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_an_epoch_takes_each_sample_at_most_once_and_whole_batches_only(size, seed, epoch):
    count, batch_size = size
    order = Order(count, batch_size, seed)
    first = epoch * order.steps_per_epoch
    steps = [order.step(first + i) for i in range(order.steps_per_epoch)]
    taken = np.concatenate(steps)
    assert all(step.shape == (batch_size,) for step in steps)
    assert len(set(taken.tolist())) == taken.size == count - count % batch_size
    assert set(taken.tolist()) <= set(range(count))


@given(sizes, seeds, st.lists(st.integers(0, 1000), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_step_depends_on_seed_and_step_alone(size, seed, steps):
    used = Order(*size, seed)
    for t in steps:
        assert used.step(t).tolist() == Order(*size, seed).step(t).tolist()


@given(st.integers(1, 8), st.integers(1, 6), seeds, st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_ranks_split_a_batch_without_overlap(ranks, rows, seed, t):
    batch = Order(100, ranks * rows, seed).step(t)
    parts = [batch[rank * rows : (rank + 1) * rows] for rank in range(ranks)]
    assert np.concatenate(parts).tolist() == batch.tolist()
    assert len(set(batch.tolist())) == ranks * rows


def test_epochs_and_seeds_differ_and_left_out_samples_come_later():
    order = Order(103, 10, seed=0)
    epochs = [np.concatenate([order.step(10 * e + i) for i in range(10)]) for e in range(8)]
    assert len({epoch.tobytes() for epoch in epochs}) == 8
    assert len(set(np.concatenate(epochs).tolist())) == 103
    assert order.step(0).tolist() != Order(103, 10, seed=1).step(0).tolist()


@given(st.integers(1, 300), st.floats(0, 0.99), seeds)
@settings(max_examples=60, deadline=None)
def test_a_split_is_whole_and_its_own_function(count, fraction, seed):
    learnt, held_out = split(count, fraction, seed)
    assert sorted([*learnt, *held_out]) == list(range(count))
    assert len(held_out) == min(count, int(np.ceil(fraction * count)))
    again = split(count, fraction, seed)
    assert (learnt.tolist(), held_out.tolist()) == (again[0].tolist(), again[1].tolist())


def test_a_split_is_drawn_by_the_seed():
    drawn = [split(1000, 0.1, seed)[1] for seed in range(2)]
    assert drawn[0].tolist() != drawn[1].tolist()
    assert all(np.diff(held_out).max() > 1 for held_out in drawn)  # not the end of the data
