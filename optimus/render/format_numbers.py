"""Formats seconds, bytes, counts and shares, the same on the terminal and in pictures."""

from __future__ import annotations

GB = 1e9


def format_gigabytes(size_bytes: float) -> str:
    """Formats decimal gigabytes with one digit."""
    return f"{size_bytes / GB:.1f}"


def format_seconds(value_s: float) -> str:
    """Formats seconds with four significant digits and no exponent."""
    if value_s >= 1000:
        return f"{value_s:.0f}"
    return f"{value_s:.3f}" if value_s < 10 else f"{value_s:.2f}"


def format_parameter_count(count: float) -> str:
    """Formats a number of parameters: 0.53M, 0.67B, 72.7B, 1026B."""
    value, unit = (count / 1e9, "B") if count >= 1e7 else (count / 1e6, "M")
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def format_percent(share: float, digits: int = 0) -> str:
    """Formats `81 %`, with a space as in all titles."""
    return f"{100 * share:.{digits}f} %"


def format_three_digits(value: float) -> str:
    """Formats three significant digits: 0.512, 5.86, 12.0, 1234."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"
