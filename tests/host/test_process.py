"""What a rank's process does before it computes."""

import os
import subprocess
import sys

SHARE = """
import torch
from slidedp.host.memory import Segment
from slidedp.host.process import share_cores

torch.set_num_threads(4)
share_cores(2)
segment = Segment(2**20, "test")
segment.touch()  # the first kernel: an offloaded layer's rank starts with one
assert torch.ones(2**20).sum() == 2**20
print(torch.get_num_threads())
segment.close()
"""


def test_kernels_leave_a_rank_its_share_of_the_cores():
    environment = os.environ | {"NUMBA_NUM_THREADS": "4"}
    command = [sys.executable, "-c", SHARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2", done.stderr
