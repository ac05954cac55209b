"""Where parameters lie in a unit, and how a unit is cut: for any shapes, chunk sizes and rank counts."""

from itertools import pairwise
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from slidedp.model.units import ALIGNMENT, Unit, _unit, chunks, padded_numel, pieces_of, shard

shapes = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


def unit_of(drawn) -> Unit:
    return _unit(0, "unit", {f"p{i}": (f"model.p{i}", shape) for i, shape in enumerate(drawn)})


@given(shapes)
def test_parameters_lie_apart_and_aligned_with_all_that_decays_in_front(drawn):
    unit = unit_of(drawn)
    assert {(p.name, p.shape) for p in unit.parameters} == {
        (f"model.p{i}", shape) for i, shape in enumerate(drawn)
    }
    for p in unit.parameters:
        assert p.offset % ALIGNMENT == 0 and p.offset + prod(p.shape) <= unit.numel
        assert (p.offset < unit.decayed) == (len(p.shape) >= 2)
    for a, b in pairwise(sorted(unit.parameters, key=lambda p: p.offset)):
        assert a.offset + prod(a.shape) <= b.offset


@given(shapes, st.integers(4096, 2**20), st.sampled_from([2, 4]), st.integers(1, 9))
def test_chunks_tile_a_unit_and_shards_tile_a_chunk(drawn, chunk_bytes, itemsize, ranks):
    unit = unit_of(drawn)
    parts = chunks(unit, chunk_bytes, itemsize, ranks)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == unit.numel
    for start, stop in parts:
        assert start % ALIGNMENT == 0
        shards = [shard(start, stop, rank, ranks) for rank in range(ranks)]
        # On the GPU: equal ones, one behind another, inside the padded buffer.
        assert {last - first for first, last, _ in shards} == {shards[0][1] - shards[0][0]}
        assert [first for first, _, _ in shards] == [start, *(last for _, last, _ in shards[:-1])]
        assert shards[-1][1] <= padded_numel(unit, ranks)
        # On the host: all of the chunk, once, and nothing beyond it.
        covered = [i for first, _, host_last in shards for i in range(first, host_last)]
        assert covered == list(range(start, stop))


@given(
    st.integers(1, 300), st.integers(1, 70), st.integers(1, 9), st.integers(4096, 2**16),
    st.sampled_from([2, 4]), st.integers(1, 9), st.booleans(),
)  # fmt: skip
def test_pieces_are_whole_rows_and_whole_chunks(rows, width, count, chunk_bytes, itemsize, ranks, tail):
    tensors = {"lm_head.weight": ("lm_head.weight", (rows, width))}
    if tail:
        tensors["norm.weight"] = ("model.norm.weight", (width,))
    unit = _unit(0, "head", tensors)
    parts = pieces_of(unit, count, ranks)
    assert 1 <= len(parts) <= count
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == unit.numel
    for start, _ in parts:
        assert start % (ranks * ALIGNMENT) == 0 and start % width == 0 and start < rows * width
    cut = chunks(unit, chunk_bytes, itemsize, ranks, count)
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut[:-1])] and cut[-1][1] == unit.numel
    assert {start for start, _ in parts} <= {start for start, _ in cut}
    for start, stop in cut[:-1]:
        assert (stop - start) % (ranks * ALIGNMENT) == 0
    assert pieces_of(_unit(0, "layer", {"mlp.up": ("up", (rows, width))}), count, ranks) == [
        (0, _unit(0, "layer", {"mlp.up": ("up", (rows, width))}).numel)
    ]
