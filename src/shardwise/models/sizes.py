"""Checks on the sizes that a user gives a model. Every error names the value, the limit and what to type instead."""

from shardwise.errors import ConfigError


def require_positive(**sizes: int) -> None:
    """Raise ConfigError unless every size is an integer of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"model.{name}={size}: must be an integer of at least 1")


def require_divides(divisor_name: str, divisor: int, *, size_name: str, size: int) -> None:
    """Raise ConfigError, with the legal values, unless `divisor` divides `size`."""
    if size % divisor:
        legal = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ConfigError(
            f"model.{divisor_name}={divisor} does not divide model.{size_name}={size}: use one of {legal}, "
            f"or change model.{size_name}"
        )


def require_rate(**rates: float) -> None:
    """Raise ConfigError unless every rate (a probability of dropping) is at least 0 and below 1."""
    for name, rate in rates.items():
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ConfigError(f"model.{name}={rate}: must be at least 0 and below 1")


def require_choice(name: str, value: object, *, choices: tuple[str, ...]) -> None:
    """Raise ConfigError, with the choices, unless `value` is one of them."""
    if value not in choices:
        raise ConfigError(f"model.{name}={value}: must be one of {', '.join(choices)}")
