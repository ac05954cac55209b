"""The order of samples: a pure function of (seed, step), so that a resumed run repeats nothing."""

import numpy as np


class Order:
    """Which samples each step takes.

    Every epoch is a new shuffle of all samples, cut into global batches of `batch_size`; the last
    `count % batch_size` of the shuffle are left out and meet other epochs. Rank r of N takes the
    contiguous rows [r * b, (r + 1) * b) of a batch, with b = batch_size / N: the batch itself does
    not depend on N. `count` is at least `batch_size` (`slidedp.data.prepare.check_samples`).
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.steps_per_epoch = count // batch_size
        self._epoch, self._shuffled = -1, np.empty(0, np.int64)

    def step(self, t: int) -> np.ndarray:
        """Sample indices [batch_size] of the global batch at 0-based step `t`."""
        epoch, batch = divmod(t, self.steps_per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._epoch, self._shuffled = epoch, random.permutation(self.count)
        return self._shuffled[batch * self.batch_size : (batch + 1) * self.batch_size]


def split(count: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples to train on and samples held out, each int64 and ascending: the fraction `held_out` of
    `count`, at least one if it is not 0, drawn by `seed` alone."""
    number = min(count, int(np.ceil(held_out * count)))
    drawn = np.random.default_rng([seed, 2**32]).permutation(count)  # no epoch has this number
    return np.sort(drawn[number:]), np.sort(drawn[:number])
