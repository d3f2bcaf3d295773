import math

import pytest

from shardwise.errors import ConfigError
from shardwise.lr_scaling import RULES, effective_lr


@pytest.mark.parametrize(
    ("rule", "base_batch_size", "global_size", "expected"),
    [
        ("none", None, 4096, 0.1),
        ("none", 64, 4096, 0.1),
        ("linear", 256, 8192, 3.2),  # Goyal et al.: 0.1 at 256 becomes 3.2 at 8192
        ("linear", 256, 64, 0.025),
        ("sqrt", 64, 256, 0.2),
        ("sqrt", 256, 64, 0.05),
    ],
)
def test_the_rules_give_the_rates_of_their_papers(rule, base_batch_size, global_size, expected):
    lr = effective_lr(rule, base_lr=0.1, base_batch_size=base_batch_size, global_size=global_size)
    assert lr == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rate_stays_what_it_is_at_its_own_batch(rule):
    assert effective_lr(rule, base_lr=3e-4, base_batch_size=96, global_size=96) == 3e-4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rule": "linear", "base_batch_size": None}, r"lr_scaling=linear needs lr_scaling.base_batch_size.*=32"),
        ({"rule": "sqrt", "base_batch_size": None}, r"lr_scaling=sqrt needs lr_scaling.base_batch_size"),
        ({"rule": "linear", "base_batch_size": 0}, "lr_scaling.base_batch_size=0"),
        ({"rule": "cubic"}, "lr_scaling=cubic.*none, linear, sqrt"),
        ({"global_size": 0}, "batch.global_size=0"),
        ({"base_lr": math.nan}, "optimizer.lr=nan"),
        ({"base_lr": -1.0}, "optimizer.lr=-1.0"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_type(changes, text):
    arguments = {"rule": "linear", "base_lr": 0.1, "base_batch_size": 64, "global_size": 32} | changes
    with pytest.raises(ConfigError, match=text) as error:
        effective_lr(arguments.pop("rule"), **arguments)
    assert "\n" not in str(error.value)
