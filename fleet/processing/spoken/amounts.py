"""How dates, times and amounts of money and of units are said in English.

Whole numbers, decimals, ordinals and years stay digits, which every voice's own pronunciation
reads; a number that is certainly no year gets its commas.
"""

import re

from fleet.processing.spoken.tables import CURRENCIES, MONTHS, PARTS, SCALES, UNITS

_THIN = "[ \u00a0\u202f]"
NUMBER = rf"(?:\d{{1,3}}(?:,\d{{3}})+|\d{{1,3}}(?:{_THIN}\d{{3}})*{_THIN}000(?!\d)|\d+)(?:\.\d+)?"


def ordinal(number: int) -> str:
    is_teen = 10 <= number % 100 <= 20
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def quantity(number: str) -> str:
    """Return a number written so that it is not read as a year."""
    whole, point, rest = re.sub(r"[,\s]", "", number).partition(".")
    return f"{int(whole):,}{point}{rest}"


def is_one(number: str) -> bool:
    return number in ("1", "1.0")


def money(symbol: str, number: str, scale: str = "") -> str:
    """Say an amount of money. `scale`: "" or what follows the number, such as `M` or `million`."""
    one, many, cent, cents = CURRENCIES[symbol]
    if re.fullmatch(r"\d+,\d{2}", number):
        number = number.replace(",", ".")
    if scale:
        return f"{quantity(number)} {SCALES.get(scale.lower(), scale)} {many}"
    whole, _, rest = number.partition(".")
    if cent and len(rest) == 2:
        small = f"{int(rest)} {cent if int(rest) == 1 else cents}"
        if not int(rest):
            return money(symbol, whole)
        return small if not int(whole.replace(",", "")) else f"{money(symbol, whole)} and {small}"
    return f"{quantity(number)} {one if is_one(number) else many}"


def measure(number: str, unit: str) -> str:
    one, many = UNITS[unit]
    return f"{quantity(number)} {one if is_one(number) else many}"


def month_named(name: str) -> str:
    """Return the full name of a month. `name`: the month or its abbreviation."""
    return next(month for month in MONTHS if month.startswith(name[:3].capitalize()))


def date(year: str, month: int, day: int) -> str | None:
    """Say a date, or None if there is no such month or day. `year`: "", two or four digits."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    if len(year) == 2:
        year = ("19" if int(year) > 50 else "20") + year
    return f"{MONTHS[month - 1]} {ordinal(day)}" + (f", {year}" if year else "")


def time_of_day(hour: int, minute: int, second: int | None, half: str) -> str | None:
    """Say a time, or None if there is no such time. `half`: "a", "p" or ""."""
    if hour > 24 or minute > 59 or (second or 0) > 59:
        return None
    words = [str(hour)]
    if minute:
        words.append(f"oh {minute}" if minute < 10 else str(minute))
    elif not half and second is None:
        words.append("o'clock" if 1 <= hour <= 12 else "hundred")
    if second:
        words.append(f"and {second} second{'s' if second != 1 else ''}")
    return " ".join(words) + (f" {half.upper()}M" if half else "")


def fraction(above: int, below: int) -> str:
    """Say a fraction of whole numbers."""
    if below in PARTS and above < below:
        one, many = PARTS[below]
        return f"one {one}" if above == 1 else f"{above} {many}"
    if (above, below) in ((24, 7), (9, 11)) or above == below:
        return f"{above} {below}"
    if above <= 12 < below <= 31:
        return date("", above, below) or ""
    return f"{above} over {below}"


def spelled(digits: str) -> str:
    return " ".join(digits)


def roman(numeral: str) -> int:
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    numbers = [values[letter] for letter in numeral]
    following = [*numbers[1:], 0]
    return sum(-n if n < after else n for n, after in zip(numbers, following, strict=True))
