import math
from fractions import Fraction

import pytest

from shardwise.errors import ConfigError
from shardwise.schedules import SHAPES, multiplier, warmup_in_steps


def curve(kind, **numbers):
    return [multiplier(kind, step, **numbers) for step in range(numbers["total_steps"])]


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_warmup_wastes_no_step_and_ends_at_the_peak(kind):
    values = curve(kind, total_steps=40, warmup_steps=4)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(values) == 1.0


@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_without_or_after_warmup_the_rate_never_rises(kind, warmup_steps):
    values = curve(kind, total_steps=50, warmup_steps=warmup_steps, min_ratio=0.1)
    after = values[max(warmup_steps - 1, 0) :]
    assert after[0] == 1.0
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
def test_the_end_is_min_ratio_and_the_last_step_still_trains(kind, min_ratio):
    numbers = {"total_steps": 100, "warmup_steps": 10, "min_ratio": min_ratio}
    assert multiplier(kind, 100, **numbers) == pytest.approx(min_ratio, abs=1e-15)
    assert min_ratio < multiplier(kind, 99, **numbers) < min_ratio + 0.06
    assert multiplier(kind, 1000, **numbers) == pytest.approx(min_ratio, abs=1e-15)


def test_cosine_and_linear_are_half_way_down_in_the_middle():
    assert multiplier("cosine", 50, total_steps=100) == pytest.approx(0.5)
    assert multiplier("linear", 50, total_steps=100) == pytest.approx(0.5)
    assert multiplier("cosine", 25, total_steps=100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert multiplier("linear", 50, total_steps=100, min_ratio=0.2) == pytest.approx(0.6)


def test_constant_stays():
    assert curve("constant", total_steps=9, warmup_steps=2, min_ratio=0.3) == [0.5] + [1.0] * 8


def test_wsd_is_stable_until_its_last_part():
    values = curve("wsd", total_steps=100, warmup_steps=10, decay_fraction=0.2)
    assert values[9:81] == [1.0] * 72
    assert values[81:] == pytest.approx([1 - k / 20 for k in range(1, 20)])
    assert curve("wsd", total_steps=5, decay_fraction=0.0) == [1.0] * 5
    assert curve("wsd", total_steps=5, decay_fraction=1.0) == pytest.approx(curve("linear", total_steps=5))


def test_a_warmup_may_be_the_whole_training():
    for kind in ("cosine", "linear", "constant"):
        assert curve(kind, total_steps=2, warmup_steps=2) == [0.5, 1.0]
    assert curve("cosine", total_steps=1) == [1.0]


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("cosine", {"warmup_steps": 11}, "schedule.warmup_steps=11 does not fit a training of 10.*from 0 to 10"),
        ("cosine", {"warmup_steps": -1}, "schedule.warmup_steps=-1"),
        ("cosnie", {}, "schedule=cosnie.*did you mean schedule=cosine"),
        ("nothing", {}, "schedule=nothing.*cosine, linear, constant, wsd"),
        ("linear", {"min_ratio": 1.5}, "schedule.min_ratio=1.5"),
        ("linear", {"min_ratio": math.nan}, "schedule.min_ratio=nan"),
        ("linear", {"total_steps": -1}, "at least 1 optimizer step, not -1"),
        ("wsd", {"decay_fraction": 2.0}, "schedule.decay_fraction=2.0"),
        ("wsd", {"warmup_steps": 9}, "9 steps of warm-up and 2 of decay.*the training's 10"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_type(kind, changes, text):
    with pytest.raises(ConfigError, match=text) as error:
        multiplier(kind, 0, **({"total_steps": 10} | changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("samples", "batch", "done", "steps"),
    [
        (0, 64, (0, 0), 0),
        (1, 64, (0, 0), 1),
        (640, 64, (0, 0), 10),
        (641, 64, (0, 0), 11),
        (Fraction(641, 10), 64, (0, 0), 2),
        (640, 64, (4, 4 * 64), 10),  # as if it had never stopped
        (641, 64, (4, 4 * 64), 11),
        (640, 64, (20, 20 * 64), 10),
        (640, 32, (4, 4 * 64), 4 + 12),  # 384 samples are left, in batches of 32
        (640, 256, (4, 4 * 64), 4 + 2),
        (640, 32, (20, 20 * 64), 10),  # it lies behind, and was 10 steps
        (640, 256, (10, 10 * 64), 10),
    ],
)
def test_a_warmup_in_samples_keeps_its_place_when_the_batch_changes(samples, batch, done, steps):
    assert warmup_in_steps(samples, batch_size=batch, done_steps=done[0], done_samples=done[1]) == steps
