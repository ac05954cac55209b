"""Memory for copies is there before it is needed, and gone afterwards."""

import torch

from slidedp.checkpoint import room as room_module
from slidedp.checkpoint.room import Room
from slidedp.host.kernels import LINE
from slidedp.host.memory import anonymous_bytes
from tests.launching import until

SIZE = 64 * 2**20


def test_it_is_populated_before_anybody_writes_to_it_and_given_back(monkeypatch):
    monkeypatch.setattr(room_module, "PIECE", SIZE // 4)
    before = anonymous_bytes()
    room = Room(SIZE)
    until(lambda: room.ready, "it is populated")
    assert anonymous_bytes() - before > 0.9 * SIZE
    part = room.take(SIZE // 2)
    room.close()
    assert room.take(1) is None
    assert anonymous_bytes() - before > 0.9 * SIZE  # somebody still holds a part
    del part
    assert anonymous_bytes() - before < 0.2 * SIZE


def test_pieces_do_not_overlap_and_end_with_the_room():
    room, taken = Room(1000), []
    for nbytes in (100, 1, 500, 200, 100):
        part = room.take(nbytes)
        taken.append(part)
        if part is not None:
            assert part.dtype == torch.uint8 and len(part) == nbytes and part.data_ptr() % LINE == 0
            part.fill_(len(taken))
    assert [part is None for part in taken] == [False, False, False, False, True]
    assert [set(part.tolist()) for part in taken[:4]] == [{1}, {2}, {3}, {4}]
    del part, taken
    room.close()


def test_what_a_limit_refuses_is_an_empty_room():
    room = Room(2**60)
    assert room.ready and room.nbytes == 0 and room.take(1) is None
    room.close()
