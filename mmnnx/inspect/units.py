"""How tables and pictures write counts, bytes, and lists of devices."""

from __future__ import annotations

from collections.abc import Iterable

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def count_text(count: int) -> str:
    """A number of parameters: exact below a million, else with three digits.

    >>> count_text(5790), count_text(8_030_261_248)
    ('5,790', '8.03 B')
    """
    for unit, name in _COUNTS:
        if count >= 0.9995 * unit:  # so that 999,600 is not "1,000 K"
            value = count / unit
            return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {name}"
    return f"{count:,}"


def byte_unit(size: float) -> tuple[float, str]:
    """The unit to show up to so many bytes in: its size, and its name.

    >>> byte_unit(3_000_000)
    (1000000.0, 'MB')
    """
    return next((unit for unit in _BYTES if size >= unit[0]), (1.0, "bytes"))


def bytes_text(size: int) -> str:
    """Bytes in decimal units, as Flax writes them.

    >>> bytes_text(80), bytes_text(999_960), bytes_text(16_060_522_496)
    ('80 B', '1.0 MB', '16.1 GB')
    """
    for unit, name in _BYTES:
        if size >= 0.99995 * unit:  # so that 999,960 is not "1,000.0 KB"
            return f"{size / unit:,.1f} {name}"
    return f"{size:,} B"


def time_text(seconds: float) -> str:
    """Seconds with three digits.

    >>> time_text(1234.5), time_text(3.5), time_text(0.0163), time_text(2e-5)
    ('1,234 s', '3.5 s', '16.3 ms', '20 us')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:  # so that 0.9997 is not "1e+03 ms"
            value = seconds / unit
            return f"{value:,.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, consecutive ones as ranges.

    >>> ranges_text([0, 1, 2, 3, 8])
    '0-3, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
