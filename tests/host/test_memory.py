"""Shared segments, and how much memory there is."""

import gc
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from slidedp.host import memory
from slidedp.host.memory import PAGE, Segment, available_bytes, pss_bytes

MIB = 2**20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> int:
    """Bytes that this process maps of shared memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def _add_one(handle, pipe):
    segment = Segment.open(handle)
    segment.array(np.float32)[:] += 1
    segment.close()
    pipe.send("done")


def test_a_spawned_process_sees_and_changes_the_same_bytes():
    context = multiprocessing.get_context("spawn")
    segment = Segment(4 * 1000, "test")
    array = segment.array(np.float32)
    array[:] = np.arange(1000)
    ours, theirs = context.Pipe()
    process = context.Process(target=_add_one, args=(segment.handle, theirs))
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == "done"
    finally:
        process.join()
    assert process.exitcode == 0
    assert (array == np.arange(1000) + 1).all()
    assert segment.tensor(torch.float32)[-1] == 1000
    segment.close()


def test_arrays_and_tensors_are_views_of_all_bytes():
    segment = Segment(64, "test")
    segment.array(np.uint16)[:] = 0x3F80  # 1.0 in BF16
    assert segment.tensor(torch.bfloat16).eq(1).all() and segment.tensor(torch.bfloat16).numel() == 32
    assert segment.array(np.float32).size == 16
    segment.touch()
    assert not segment.array(np.uint16).any()
    segment.close()


def test_a_segment_may_be_empty():
    segment = Segment(0, "test")
    opened = Segment.open(segment.handle)
    for one in (segment, opened):
        assert one.tensor(torch.bfloat16).numel() == one.array(np.float32).size == 0
        one.close()


def test_close_gives_back_descriptor_and_memory():
    Segment(PAGE, "warm").touch()  # whatever the kernels keep is there before we count
    gc.collect()
    before, resident = descriptors(), shared_memory()
    segment = Segment(32 * MIB, "test")
    opened = Segment.open(segment.handle)
    segment.touch()
    array = opened.array(np.float32)
    array[:] = 1
    assert descriptors() == before + 1  # the owner's; a mapping needs none
    assert shared_memory() >= resident + 32 * MIB
    handle = segment.handle
    segment.close()
    opened.close()
    assert descriptors() == before
    assert (array == 1).all()  # the mapping lives as long as a view of it
    del array
    gc.collect()
    assert descriptors() == before and shared_memory() < resident + MIB
    with pytest.raises(OSError):
        Segment.open(handle)
    segment.close()  # a second time does nothing
    opened.close()


def test_pss_grows_with_what_is_touched():
    before = pss_bytes()
    segment = Segment(32 * MIB, "test")
    assert pss_bytes() < before + 16 * MIB
    segment.touch()
    assert pss_bytes() > before + 24 * MIB
    assert pss_bytes(os.getpid()) == pytest.approx(pss_bytes(), rel=0.1)
    segment.close()


# --- how much there is ----------------------------------------------------------------------------


def test_available_bytes_of_this_machine():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 64 * MIB < available_bytes() <= total
    for limit, used in memory._cgroup_usage():
        assert 0 <= used <= limit * 1.01 and limit > 0


class FakeFiles:
    """Stands for `Path` of the memory module: /proc and /sys below a folder of the test."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        self.root = root
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def __call__(self, name: str) -> Path:
        return self.root / name.lstrip("/")


MEMINFO = "MemTotal:       16000 kB\nMemFree:    1000 kB\nMemAvailable:    8000 kB\nHugePages_Total: 0\n"
KIB = 1024


def level(limit, used, cache, v1=False):
    """Files of one cgroup."""
    names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    limit_name, used_name, cache_name = names if v1 else ("max", "current", "inactive_file")
    return {
        f"memory.{limit_name}": f"{limit}\n",
        f"memory.{used_name}": f"{used}\n",
        "memory.stat": f"anon 5\n{cache_name} {cache}\n",
    }


def files(cgroup, *levels):
    found = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": cgroup}
    for folder, contents in levels:
        found |= {f"{folder}/{name}": text for name, text in contents.items()}
    return found


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (files(""), 8000 * KIB),
        # v2: the limit of a level above counts, and "max" is none
        (
            files(
                "0::/a/b\n",
                ("/sys/fs/cgroup/a/b", level("max", 10, 0)),
                ("/sys/fs/cgroup/a", level(5000 * KIB, 3000 * KIB, 500 * KIB)),
            ),
            2500 * KIB,
        ),
        # v2 inside a container, whose namespace makes its own cgroup the root
        (files("0::/\n", ("/sys/fs/cgroup", level(1000 * KIB, 400 * KIB, 0))), 600 * KIB),
        # v1 has no limit: a number beyond all memory
        (
            files(
                "5:cpu:/x\n4:memory:/x\n",
                ("/sys/fs/cgroup/memory/x", level(2**63 - 4096, 10, 0, v1=True)),
                ("/sys/fs/cgroup/memory", level(2**63 - 4096, 10, 0, v1=True)),
            ),
            8000 * KIB,
        ),
        (files("4:hugetlb,memory:/x\n", ("/sys/fs/cgroup/memory/x", level(900, 700, 100, v1=True))), 300),
        # more used than allowed, for a moment
        (files("0::/\n", ("/sys/fs/cgroup", level(1000, 1500, 0))), 0),
        # v1 path of the host, seen inside a container that only mounts its own level
        (
            files("4:memory:/docker/1\n", ("/sys/fs/cgroup/memory", level(7000, 2000, 0, v1=True))),
            5000,
        ),
        # a level above the limit of this process that leaves less
        (
            files(
                "0::/a/b\n",
                ("/sys/fs/cgroup/a/b", level(5000, 1000, 0)),
                ("/sys/fs/cgroup/a", level(6000, 5500, 0)),
            ),
            500,
        ),
    ],
)
def test_cgroup_limits(tmp_path, monkeypatch, tree, expected):
    monkeypatch.setattr(memory, "Path", FakeFiles(tmp_path, tree))
    assert available_bytes() == expected
