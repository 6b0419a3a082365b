"""Numbers as people read them. What is not known is a dash, never 0."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from protocol.status.figures import Figure

DASH: Final = "–"
ABOUT: Final = "≈ "
"""Before every estimated number."""

_RAISED: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_MINUTE: Final = 60.0
_HOUR: Final = 3600.0
_DAY: Final = 86400.0


def human_bytes(count: float) -> str:
    """A byte count with a decimal unit: 954,190,848 becomes "954.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def count(value: int | None) -> str:
    """A whole number in groups of three digits."""
    return DASH if value is None else f"{value:,}"


def counted(value: int, one: str, many: str | None = None) -> str:
    """``1 cut``, ``2 cuts``."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def nbytes(value: int | None) -> str:
    """Bytes of a count."""
    return DASH if value is None else human_bytes(value)


def plain(value: float, unit: str = "") -> str:
    """A number in about three digits, with its unit; a small one in two that count."""
    if 0 < abs(value) < 0.00095:
        digits, _, power = f"{value:.1e}".partition("e")
        text = f"{digits} × 10{str(int(power)).translate(_RAISED)}"
    elif 0 < abs(value) < 0.095:
        text = f"{value:.2g}"
    else:
        text = f"{value:,.{0 if abs(value) >= 100 else 1}f}"
    return f"{text} {unit}" if unit else text


def figure(known: Figure, unit: str = "") -> str:
    """A figure in about three digits; "≈" before an estimate."""
    return DASH if known.value is None else _about(known, plain(known.value, unit))


def figure_bytes(known: Figure, per: str = "") -> str:
    """A figure that counts bytes; ``per`` is appended: ``/s``."""
    return DASH if known.value is None else _about(known, human_bytes(known.value) + per)


def share(known: Figure) -> str:
    """A fraction of 1, in percent."""
    return DASH if known.value is None else _about(known, f"{known.value * 100:.0f} %")


def milliseconds(known: Figure) -> str:
    """A figure in ms: ``0.4 ms``, ``84 ms``, ``1.2 s``, ``2 min 5 s``."""
    return DASH if known.value is None else _about(known, duration(known.value / 1e3))


def seconds(known: Figure) -> str:
    """A figure in seconds, as :func:`milliseconds`."""
    return DASH if known.value is None else _about(known, duration(known.value))


def duration(lasted_s: float) -> str:
    """A time of any length in at most two units."""
    sign, lasted_s = ("−", -lasted_s) if lasted_s < 0 else ("", lasted_s)
    if lasted_s < 0.9995:
        ms = lasted_s * 1e3
        return f"{sign}{ms:.1f} ms" if ms < 9.95 else f"{sign}{ms:.0f} ms"
    if lasted_s < 59.95:
        return f"{sign}{lasted_s:.1f} s"
    whole = round(lasted_s)
    if whole < _HOUR:
        return sign + _pair(whole // 60, "min", whole % 60, "s")
    if whole < _DAY:
        return sign + _pair(whole // 3600, "h", whole % 3600 // 60, "min")
    return sign + _pair(whole // 86400, "d", whole % 86400 // 3600, "h")


def ago(at: float, now: float) -> str:
    """How long ago something was, coarsely: what changes every second is not calm."""
    age = max(0.0, now - at)
    if age < 5:
        return "just now"
    if age < _MINUTE:
        return f"{int(age // 5 * 5)} s ago"
    if age < _HOUR:
        return f"{int(age // _MINUTE)} min ago"
    if age < _DAY:
        return f"{int(age // _HOUR)} h ago"
    return f"{int(age // _DAY)} d ago"


def moment(at: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A day and a time of it to the second, or in another ``form``, by this machine's clock."""
    found = None if at is None else local(at)
    return DASH if found is None else f"{found:{form}}"


def local(at: float) -> datetime | None:
    """A time of a day by this machine's clock, if there is such a day: somebody says it."""
    try:
        return datetime.fromtimestamp(at).astimezone()
    except (ValueError, OverflowError, OSError):
        return None


def _pair(large: int, unit: str, small: int, part: str) -> str:
    return f"{large} {unit} {small} {part}" if small else f"{large} {unit}"


def _about(known: Figure, text: str) -> str:
    return f"{ABOUT}{text}" if known.basis == "estimated" else text
