"""The gradient noise scale, and with it the critical batch size: pure arithmetic on squared norms of gradients.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1. The gradient over n samples, drawn independently, has the true
gradient G as its mean and a covariance of Sigma / n, so that E|g_n|^2 = |G|^2 + tr(Sigma) / n. Two sizes n give both.
"""

import math
from collections.abc import Mapping


def estimate(small_square: float, big_square: float, *, small_batch: float, big_batch: float) -> tuple[float, float]:
    """Unbiased estimates of |G|^2 and tr(Sigma) from one step; either may come out negative.

    Args:
        small_square: squared 2-norm of the mean gradient over ``small_batch`` samples, or a mean of such.
        big_square: the same over ``big_batch`` samples.
        small_batch: samples, below ``big_batch``. Where shares differ, the mean has to be weighted by their sizes, and
            this is the size of the whole over the number of shares: E of sum_r w_r |g_r|^2, with w_r = n_r / n, is
            |G|^2 + sum_r w_r tr(Sigma) / n_r, which is |G|^2 + R tr(Sigma) / n.
        big_batch: samples.
    """
    assert 0 < small_batch < big_batch
    norm_sq = (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)
    variance = (small_square - big_square) / (1 / small_batch - 1 / big_batch)
    return norm_sq, variance


def about(size: float) -> str:
    """``size`` to two significant digits, at least 1: ``2,100``."""
    size = max(size, 1.0)
    return f"{round(size, 1 - math.floor(math.log10(size))):,.0f}"


ENOUGH = 5
"""Measurements below which their averages say nothing: ratios of the same run then differ by factors."""


def verdict(batch: int, *, norm_sq: float, variance: float, measurements: int, more: str) -> str:
    """One line: how a batch of ``batch`` samples compares with the critical batch size.

    Args:
        norm_sq: estimate of |G|^2.
        variance: estimate of tr(Sigma), for one sample.
        measurements: how many these are averages of.
        more: what makes more of them, where there are fewer than :data:`ENOUGH`.
    """
    number = f"{measurements:,} measurement{'' if measurements == 1 else 's'}"
    if measurements < ENOUGH:
        return f"only {number} of the gradient noise: no estimate ({more})"
    if norm_sq <= 0:
        return (
            f"the critical batch size is not estimable: |G|^2 came out as {norm_sq:.2g}, lost in the noise; batch "
            f"{batch:,} is probably far below it (more steps, or a larger batch, would tell; {number})"
        )
    if variance <= 0:
        return (
            f"the critical batch size is not estimable: tr(Sigma) came out as {variance:.2g}, too small to be seen; "
            f"batch {batch:,} is probably far above it ({number})"
        )
    critical = variance / norm_sq
    where, so = ("below", "still save steps") if batch < critical else ("above", "save few steps")
    return (
        f"batch {batch:,} is {where} the critical batch size of about {about(critical)}: larger batches {so} ({number})"
    )


class NoiseScale:
    """Exponential moving averages of |G|^2 and tr(Sigma), each for itself: only their ratio is of use, and the mean of
    the single steps' ratios is not the ratio of the means.

    Args:
        decay: of the averages, per measurement.
    """

    def __init__(self, *, decay: float) -> None:
        self.decay = decay
        self.measurements = 0
        self._weight = 0.0
        """What the measurements so far weigh together: the correction for the start from zero."""
        self._norm_sq = 0.0
        self._variance = 0.0

    def add(self, norm_sq: float, variance: float) -> None:
        """Take in what ``estimate`` said of one more step."""
        new = 1 - self.decay
        self.measurements += 1
        self._weight = self.decay * self._weight + new
        self._norm_sq = self.decay * self._norm_sq + new * norm_sq
        self._variance = self.decay * self._variance + new * variance

    @property
    def norm_sq(self) -> float:
        """Average of |G|^2; there has to be a measurement."""
        return self._norm_sq / self._weight

    @property
    def variance(self) -> float:
        """Average of tr(Sigma), for one sample; there has to be a measurement."""
        return self._variance / self._weight

    @property
    def critical_batch_size(self) -> float | None:
        """B_simple = tr(Sigma) / |G|^2 in samples; None where one of them did not come out positive."""
        estimable = self.measurements and self._norm_sq > 0 and self._variance > 0
        return self.variance / self.norm_sq if estimable else None

    def state_dict(self) -> dict[str, float]:
        return {
            "measurements": self.measurements,
            "weight": self._weight,
            "gradient_norm_sq": self._norm_sq,
            "gradient_variance": self._variance,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.measurements = int(state["measurements"])
        self._weight = float(state["weight"])
        self._norm_sq = float(state["gradient_norm_sq"])
        self._variance = float(state["gradient_variance"])
