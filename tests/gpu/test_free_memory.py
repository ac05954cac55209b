"""What preflight reads about GPUs: CUDA's own numbers, without a context of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
import torch
from slidedp.gpus import free_gpu_bytes
count = torch.cuda.device_count()
said = free_gpu_bytes(count)
assert not torch.cuda.is_initialized()
for index, free in enumerate(said):
    # A context takes half a GiB itself, and other tests may hold some.
    cuda, total = torch.cuda.mem_get_info(index)
    assert abs(free - cuda) < 2 * 2**30, (index, free, cuda)
print(count)
"""


@pytest.mark.parametrize("last_alone", [False, True])
def test_free_memory_is_that_of_cuda_and_takes_no_context(last_alone, monkeypatch):
    import torch

    if last_alone:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(torch.cuda.device_count() - 1))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert last_alone is False or done.stdout.split() == ["1"]
