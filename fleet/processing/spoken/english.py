"""Rules that say numbers, dates, amounts, addresses and signs as an English speaker does."""

import re
import unicodedata
from collections.abc import Callable, Iterable

from fleet.processing.spoken import amounts
from fleet.processing.spoken.abbreviations import EXPANSIONS, NUMBERED, TITLES
from fleet.processing.spoken.amounts import NUMBER
from fleet.processing.spoken.rules import Rule, Speak
from fleet.processing.spoken.tables import CURRENCIES, SIGNS, UNITS, VULGAR


def _any_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def _rule(pattern: str, say: Callable[..., str | None]) -> Rule:
    """Return a rule that speaks the result of `say`, or the matched text if the result is None.
    `say` is called with the pattern's groups; a group that did not match is "".
    """

    def said(match: re.Match[str], _speak: Speak) -> str:
        words = say(*(group or "" for group in match.groups()))
        return match[0] if words is None else words

    return Rule(pattern, said)


_FREE = r"(?<![\w.,:/-])"
"""Lookbehind for the start of a number that is not part of a longer number, word or path."""
_MINUS = r"(?<![\w.,)%-])[-−](?=[\d$€£])"
_DOMAIN = (
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+"
    r"(?:com|org|net|edu|gov|io|ai|dev|app|info|co|uk|de|fr|eu|us|ca|au|jp|ch|me|tv)"
)
_ADDRESS_SIGNS = {".": "dot", "-": "dash", "_": "underscore", "+": "plus", "/": "slash"}
_MONTH = (
    r"(January|February|March|April|May|June|July|August|September|October|November|December"
    r"|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?)"
)
_HALF = r"(?:\s?([AaPp])\.?[Mm]\b\.?)"
_SCALE = r"(?:\s?(thousand|million|billion|trillion|bn|mn|[kKmMbBtT])\b)?"
_SYMBOLS = _any_of(symbol for symbol in CURRENCIES if not symbol.isalpha())
_CODES = _any_of(symbol for symbol in CURRENCIES if symbol.isalpha())
_SPACED_UNITS = _any_of(unit for unit in UNITS if unit not in ("K", "k", "x", "×", "bn"))


def _address(text: str) -> str:
    parts = re.split(r"([._+/-])", text)
    return " ".join(_ADDRESS_SIGNS.get(part, part) for part in parts if part)


def _url(host: str, path: str) -> str:
    """Say a web address: the host, and a path that is short; no query."""
    path = re.split(r"[?#]", path)[0].strip("/")
    spoken_path = f" slash {_address(path)}" if path and len(path) <= 30 else ""
    return _address(re.sub(r"^www\.", "", host)) + spoken_path


def _phone(text: str) -> str:
    groups = re.findall(r"\d+", text)
    plus = "plus " if text.startswith("+") else ""
    return plus + ", ".join(amounts.spelled(group) for group in groups)


def _time(hour: str, minute: str, second: str, half: str) -> str | None:
    return amounts.time_of_day(
        int(hour), int(minute), int(second) if second else None, half.lower()
    )


def _us_date(first: str, second: str, year: str) -> str | None:
    month, day = (first, second) if int(first) <= 12 else (second, first)
    return amounts.date(year, int(month), int(day))


def _month_day(month: str, day: str, year: str) -> str:
    return f"{amounts.month_named(month)} {amounts.ordinal(int(day))}" + (
        f", {year}" if year else ""
    )


def _day_month(the: str, day: str, month: str, year: str) -> str:
    said = f"the {amounts.ordinal(int(day))} of {amounts.month_named(month)}"
    return (said if the != "The " else said.capitalize()) + (f", {year}" if year else "")


def _iso(year: str, month: str, day: str, hour: str, minute: str) -> str | None:
    said = amounts.date(year, int(month), int(day))
    at = amounts.time_of_day(int(hour), int(minute), None, "") if hour else None
    return f"{said} at {at}" if said and at else said


def _range(first: str, last: str, unit: str) -> str:
    if unit:
        return f"{amounts.quantity(first)} to {amounts.measure(last, unit)}"
    return f"{first} to {last}"


def _money_range(symbol: str, first: str, last: str, scale: str) -> str:
    return f"{amounts.quantity(first)} to {amounts.money(symbol, last, scale)}"


_ADDRESSES = (
    _rule(
        r"(?<![\w.])(?:mailto:)?([\w.+-]+)@([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)\b",
        lambda name, host: f"{_address(name)} at {_address(host)}",
    ),
    _rule(
        r"\b(?:https?|ftp)://([\w.-]+)(?::\d+)?((?:[/?#][^\s<>()\"']*[^\s<>()\"'.,;:!?*_])?/?)",
        _url,
    ),
    _rule(rf"(?<![\w.@-])({_DOMAIN})\b((?:/[^\s<>()\"']*[^\s<>()\"'.,;:!?*_])?/?)(?![\w@])", _url),
)
_DATES = (
    _rule(r"(?<![\w-])(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2}):(\d{2})(?::\d{2})?Z?)?(?![\w-])", _iso),
    _rule(r"(?<![\w./])(\d{1,2})/(\d{1,2})/(\d{4}|\d{2})(?![\w/])", _us_date),
    _rule(
        rf"\b{_MONTH} (\d{{1,2}})(?:st|nd|rd|th)?(?![\w:%]|[.,]\d)(?:,? (\d{{4}})\b)?", _month_day
    ),
    _rule(
        rf"(?<![\w.,])([Tt]he )?(\d{{1,2}})(?:st|nd|rd|th)? (?:of )?{_MONTH}(?!\w)"
        r"(?:,? (\d{4})\b)?",
        _day_month,
    ),
    _rule(rf"(?<![\w.,:])(\d{{1,2}}):(\d{{2}})(?::(\d{{2}}))?{_HALF}?(?![\w:])", _time),
    _rule(rf"(?<![\w.,:])(\d{{1,2}}){_HALF}(?!\w)", lambda hour, half: f"{hour} {half.upper()}M"),
    _rule(
        r"\b(Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?(?=,? \d{4}\b)",
        amounts.month_named,
    ),
    _rule(r"(?<=[\dmM.])\s?[-–]\s?(?=\d{1,2}(?::\d{2}|\s?[AaPp]\.?[Mm]))", lambda: " to "),
    _rule(r"(?<![\w.,:])(\d{1,3}):(\d{1,3})(?![\w:]|\.\d)", lambda a, b: f"{a} to {b}"),
)
_PHONES = (
    Rule(
        r"(?<![\w.-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\w-])"
        r"|(?<![\w.-])\d{3}-\d{4}(?![\w-])"
        r"|(?<![\w.-])\+\d{1,3}(?:[ -]\d{2,4}){2,5}(?![\w-])",
        lambda match, _: _phone(match[0]),
    ),
)
_PRICE = rf"(\d+,\d{{2}}(?!\d)|{NUMBER})"
_MONEY = (
    _rule(rf"({_SYMBOLS})\s?({NUMBER})\s?[-–]\s?(?:{_SYMBOLS})?({NUMBER}){_SCALE}", _money_range),
    _rule(rf"(?<!\w)({_SYMBOLS})\s?{_PRICE}{_SCALE}", amounts.money),
    _rule(rf"\b({_CODES})\s?({NUMBER}){_SCALE}(?!\w)", amounts.money),
    _rule(
        rf"{_FREE}{_PRICE}{_SCALE}\s?({_SYMBOLS}|(?:{_CODES})\b)",
        lambda number, scale, symbol: amounts.money(symbol, number, scale),
    ),
    _rule(
        rf"({_SYMBOLS})[-−]({NUMBER})",
        lambda symbol, number: f"minus {amounts.money(symbol, number)}",
    ),
    _rule(rf"{_FREE}({NUMBER})\s?¢", lambda n: f"{n} cent{'' if amounts.is_one(n) else 's'}"),
)
_NUMBERS = (
    _rule(r"(?<![\w.,])(\d{3}0|['‘’]\d0)s(?!\w)", lambda decade: decade.replace("’", "'") + "s"),
    _rule(
        r"(?<![\w.,])(\d+(?:\.\d+)?)[eE]([-+]?)(\d+)(?!\w)",
        lambda n, sign, power: (
            f"{n} times 10 to the power of {'minus ' if sign == '-' else ''}{power}"
        ),
    ),
    _rule(r"(?<!\w)([48])K(?= (?:video|TV|monitor|screen|display|resolution))", lambda n: f"{n} K"),
    _rule(_MINUS, lambda: "minus "),
    _rule(
        r"(?<![\w.])(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})(?![\w.]\d)",
        lambda address: address.replace(".", " dot "),
    ),
    _rule(
        r"(?<![\w.])[vV]\.?\s?(\d+(?:\.\d+)*)(?![\w])",
        lambda parts: "version " + parts.replace(".", " point "),
    ),
    _rule(r"(?<![\w.])(\d+(?:\.\d+){2,})(?!\w)", lambda parts: parts.replace(".", " point ")),
    _rule(
        r"(?<![\w./])(?:(\d{1,3}) )?(\d{1,3})/(\d{1,3})(?![\w/]|\.\d)",
        lambda whole, above, below: (
            (f"{whole} and " if whole else "") + amounts.fraction(int(above), int(below))
        ).replace("and one ", "and a " if whole else "and one "),
    ),
    _rule(r"(?<![\w./])(\d+\.\d+)/(\d+)(?![\w/])", lambda a, b: f"{a} out of {b}"),
    _rule(rf"(\d+)\s?([{''.join(VULGAR)}])", lambda whole, part: f"{whole} and {VULGAR[part]}"),
    _rule(
        rf"{_FREE}({NUMBER})(?:\s?(?:{_SPACED_UNITS}))?(?:\s?–\s?|-)"
        rf"({NUMBER})(?:\s?({_SPACED_UNITS})(?!\w))?(?![\w-])",
        _range,
    ),
    _rule(r"(?<![\w.,])(\d)['′](\d{1,2})[\"″]", lambda feet, inches: f"{feet} foot {inches}"),
    _rule(rf"{_FREE}({NUMBER})-({_SPACED_UNITS})(?!\w)", lambda n, unit: f"{n} {UNITS[unit][0]}"),
    _rule(
        rf"(?<![\w.,])({NUMBER})\s?({_SPACED_UNITS})(?![\w²³])(?:\.(?= [a-z]))?", amounts.measure
    ),
    _rule(rf"(?<![\w.,])({NUMBER})(K|k|bn|x|×)(?!\w)", amounts.measure),
    _rule(
        rf"{_FREE}(\d{{1,3}}(?:[ \u00a0\u202f]\d{{3}})*[ \u00a0\u202f]000)(?!\w)", amounts.quantity
    ),
    _rule(rf"(?<![\w.,])({NUMBER})M(?!\w)", lambda number: f"{number} million"),
    _rule(r"(?<![\w.,])(\d{1,2}(?:,\d{1,2})+)(?![\w,])", lambda listed: listed.replace(",", ", ")),
    _rule(r"~\s?(?=[$€£]?\d)", lambda: "about "),
)
_ROMAN = (
    _rule(
        r"\b(Chapter|chapter|Part|part|Act|Section|section|Volume|Book|Phase|phase|Article"
        r"|World War|Type|type|Level|Stage|stage|Class|Grade|Episode|Round|Super Bowl|Apollo"
        r"|Rocky) "
        r"([IVXLC]+)\b(?!['’.]\w)",
        lambda name, numeral: f"{name} {amounts.roman(numeral)}",
    ),
    _rule(
        r"\b(King|Queen|Pope|Henry|Louis|Edward|George|William|Charles|James|Richard|Elizabeth"
        r"|Napoleon|Pius|Benedict|Leo|John Paul|Frederick|Philip|Alexander|Nicholas|Catherine) "
        r"([IVX]+)\b(?!['’.]\w)(?<! I)",
        lambda name, numeral: f"{name} the {amounts.ordinal(amounts.roman(numeral))}",
    ),
)
_ABBREVIATIONS = (
    _rule(rf"\b({_any_of(TITLES)})\.(?= ?[A-Z]| and\b)", lambda title: TITLES[title]),
    _rule(r"\bSt\.(?= [A-Z])", lambda: "Saint"),
    _rule(r"(?<=[a-z] )St\.", lambda: "Street"),
    _rule(rf"(?<![\w.])({_any_of(NUMBERED)})(?= ?\d)", lambda name: NUMBERED[name] + " "),
    _rule(
        rf"(?<![\w.])({_any_of(n for n in EXPANSIONS if n.endswith('.'))})(\s*$)?",
        lambda name, end: EXPANSIONS[name] + ("." if end else ""),
    ),
    _rule(r"(?<!\w)w/o(?!\w)", lambda: "without"),
    _rule(r"(?<!\w)w/ ?(?=\w)", lambda: "with "),
    _rule(r"№ ?(?=\d)", lambda: "number "),
)
_SIGNS = (
    _rule(r"-->|->|=>|⇒", lambda: " to "),
    _rule(r"<=", lambda: " is at most "),
    _rule(r">=", lambda: " is at least "),
    _rule(r"!=", lambda: " is not equal to "),
    _rule(r"===?", lambda: " equals "),
    _rule(r"\s<\s", lambda: " is less than "),
    _rule(r"\s>\s", lambda: " is greater than "),
    _rule(r"<\s?(?=[$€£]?\d)", lambda: "less than "),
    _rule(r">\s?(?=[$€£]?\d)", lambda: "more than "),
    _rule(
        r"(?<=[\d)²³]) [-−] ?(?=[\w(])|(?<=\b[a-z]) [-−] (?=[\d(])|(?<=\w)−(?=\w)",
        lambda: " minus ",
    ),
    _rule(r"(?<=\w)\+\+", lambda: " plus plus"),
    _rule(r"(?<=\d)\+(?!\w)", lambda: " plus"),
    _rule(r"\^\{?2\}?(?!\w)", lambda: " squared"),
    _rule(r"\^\{?3\}?(?!\w)", lambda: " cubed"),
    _rule(r"\^\{?([-−]?)(\w+)\}?", lambda m, n: f" to the power of {'minus ' if m else ''}{n}"),
    _rule(r"#(?=\d)", lambda: "number "),
    _rule(r"(?<!\w)#(?=[A-Za-z])", lambda: "hashtag "),
    _rule(r"(?<![\w.])@(?=\w)|(?<=\s)@(?=\s)", lambda: "at "),
    _rule(r"(?<=\w)@(?=\w)", lambda: " at "),
    _rule(r"([₀-₉])", lambda digit: f" {unicodedata.digit(digit)} "),
    _rule(
        r"(?<=[\w%])\s?/\s?(?=(?:second|minute|hour|day|night|week|month|year|person|user|item"
        r"|page|unit|request)\b)",
        lambda: " per ",
    ),
    _rule(
        rf"(?<=[A-Za-z\d%])\s?/\s?({_SPACED_UNITS})(?!\w)",
        lambda unit: f" per {UNITS[unit][0]}",
    ),
    _rule(r"\band/or\b", lambda: "and or"),
    _rule(r"\b([Hh])e/she\b", lambda h: f"{h}e or she"),
    _rule(r"(?<=[A-Z])/(?=[A-Z])", lambda: " "),
    _rule(r"(?<=[A-Za-z])\s?/\s?(?=[A-Za-z])", lambda: " slash "),
    _rule(
        r"(?<=\w)\.(?=(?:py|js|ts|txt|md|csv|json|yaml|yml|html|css"
        r"|pdf|png|jpg|zip|exe|toml|sh)\b)",
        lambda: " dot ",
    ),
    _rule(r"(?:\.{3,}|…)\s?", lambda: "… "),
    _rule(r"--+|—|(?<=\s)[–-](?=\s)", lambda: ", "),
    _rule(rf"([{re.escape(''.join(SIGNS))}])", lambda sign: f" {SIGNS[sign]} "),
    _rule(r"[‘’ʼ]", lambda: "'"),
    _rule(r"[\[\]{}<>\\|_^~]", lambda: " "),
    _rule(r"\$", lambda: ""),
)
_LONG = Rule(
    r"\d{16,}|\d{1,3}(?:,\d{3}){6,}",
    lambda match, _: amounts.spelled(match[0].replace(",", "")),
)
"""Numbers that nobody reads as a whole."""
ENGLISH = (
    _LONG,
    *_ADDRESSES,
    *_DATES,
    *_PHONES,
    *_MONEY,
    *_NUMBERS,
    *_ROMAN,
    *_ABBREVIATIONS,
    *_SIGNS,
)
