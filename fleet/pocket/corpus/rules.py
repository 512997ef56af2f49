"""What Pocket works out: sums, counting, the calendar, the clock, spelling. Rows are held out as well as phrasings."""

from collections.abc import Sequence

from fleet.pocket.corpus.table import Row, Table, pairs, rows
from fleet.pocket.corpus.text import number
from fleet.pocket.corpus.words import ANIMALS, COLOURS, DAYS, FOODS, MONTHS, OBJECTS, PLACES


def _sums(operation: str, triples: list[tuple[int, int, int]], by_rule: bool) -> Table:
    ask = f"{{a}} {operation} {{b}}"
    return Table(
        asks=[
            f"what is {ask}", f"how much is {ask}", f"tell me {ask}", f"{ask}", f"{ask} is what",
            f"can you tell me what {ask} is", f"do you know how much {ask} is", f"tell me what {ask} is",
            f"tell me how much {ask} is",
            f"how much does {ask} make", f"what does {ask} make", f"do you know {ask}", f"can you tell me {ask}",
        ],
        new_asks=[f"can you tell me how much {ask} is", f"do you know what {ask} is"],
        answer=f"{ask} is {{c}}",
        rows=[{"a": number(a), "b": number(b), "c": number(c)} for a, b, c in triples],
        by_rule=by_rule,
    )  # fmt: skip


SUMS = (
    _sums("plus", [(a, b, a + b) for a in range(21) for b in range(21)], by_rule=True),
    _sums("minus", [(a, b, a - b) for a in range(21) for b in range(a + 1)], by_rule=True),
    # By heart, as children do: a product does not follow from its neighbours.
    _sums("times", [(a, b, a * b) for a in range(2, 11) for b in range(2, 11)], by_rule=False),
    Table(
        asks=[
            "which is bigger {a} or {b}",
            "which is more {a} or {b}",
            "what is bigger {a} or {b}",
            "is {a} or {b} bigger",
            "tell me which is more {a} or {b}",
            "which number is bigger {a} or {b}",
            "do you know which is bigger {a} or {b}",
        ],
        new_asks=["what is more {a} or {b}", "tell me which is bigger {a} or {b}"],
        answer="{more} is bigger than {less}",
        rows=[
            {"a": number(a), "b": number(b), "more": number(max(a, b)), "less": number(min(a, b))}
            for a in range(1, 21)
            for b in range(1, 21)
            # One order a pair, alternating: were both asked, training would have the held-out answer from the other.
            if a != b and (a < b) == ((a + b) % 2 == 0)
        ],
        by_rule=True,
    ),
)


def _count(first: int, last: int) -> str:
    step = 1 if last > first else -1
    return " ".join(number(value) for value in range(first, last + step, step))


COUNTING = (
    Table(
        asks=[
            "count to {last}",
            "count up to {last}",
            "can you count to {last}",
            "count from one to {last}",
            "please count up to {last}",
            "can you count up to {last}",
            "please count from one to {last}",
            "count for me to {last}",
        ],
        new_asks=["please count to {last}", "can you count from one to {last}"],
        answer="{counted}",
        rows=[{"last": number(last), "counted": _count(1, last)} for last in range(2, 11)],
    ),
    Table(
        asks=[
            "count from {a} to {b}",
            "please count from {a} to {b}",
            "can you count from {a} to {b}",
            "can you please count from {a} to {b}",
            "count for me from {a} to {b}",
            "please count for me from {a} to {b}",
        ],
        new_asks=["please can you count from {a} to {b}"],
        answer="{counted}",
        rows=[
            {"a": number(a), "b": number(b), "counted": _count(a, b)}
            for a in range(2, 21)
            for b in range(a - 5, a + 6)
            if b >= 0 and abs(a - b) >= 2
        ],
        by_rule=True,
    ),
    Table(
        asks=[
            "what comes after {a}",
            "what number comes after {a}",
            "which number is after {a}",
            "what is the next number after {a}",
        ],
        new_asks=["which number comes after {a}", "tell me what comes after {a}"],
        answer="after {a} comes {b}",
        rows=[{"a": number(value), "b": number(value + 1)} for value in range(99)],
        by_rule=True,
    ),
    Table(
        asks=["what comes before {a}", "what number comes before {a}", "which number is before {a}"],
        new_asks=["which number comes before {a}", "tell me what comes before {a}"],
        answer="before {a} comes {b}",
        rows=[{"a": number(value), "b": number(value - 1)} for value in range(1, 100)],
        by_rule=True,
    ),
)


def _order(kind: str, names: Sequence[str]) -> tuple[Table, Table]:
    after = rows("a b", names, [*names[1:], names[0]])
    before = rows("a b", names, [names[-1], *names[:-1]])
    return (
        Table(
            asks=[f"what {kind} comes after {{a}}", f"which {kind} is after {{a}}", f"tell me the {kind} after {{a}}"],
            new_asks=[f"which {kind} comes after {{a}}", f"what is the {kind} after {{a}}"],
            answer="after {a} comes {b}",
            rows=after,
        ),
        Table(
            asks=[f"what {kind} comes before {{a}}", f"which {kind} is before {{a}}", f"tell me the {kind} before {{a}}"],
            new_asks=[f"which {kind} comes before {{a}}", f"what is the {kind} before {{a}}"],
            answer="before {a} comes {b}",
            rows=before,
        ),
    )


_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_MONTH_DAYS = [number(days) for days in (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)]

CALENDAR = (
    *_order("day", DAYS),
    *_order("month", MONTHS),
    Table(
        asks=["how many days does {month} have", "how many days are in {month}", "how many days has {month}"],
        new_asks=["tell me how many days {month} has", "do you know how many days are in {month}"],
        answer="{month} has {days} days",
        rows=rows("month days", MONTHS, _MONTH_DAYS),
    ),
    Table(
        asks=["what is the {nth} month", "which month is the {nth}", "tell me the {nth} month"],
        new_asks=["which is the {nth} month"],
        answer="the {nth} month is {month}",
        rows=rows("nth month", _ORDINALS, MONTHS),
    ),
    Table(
        asks=["what is the {nth} day of the week", "which day is the {nth}", "tell me the {nth} day of the week"],
        new_asks=["which is the {nth} day of the week"],
        answer="the {nth} day is {day}",
        rows=rows("nth day", _ORDINALS[:7], DAYS),
    ),
    Table(
        asks=["what day is it", "what day is it today", "which month is it", "what is the date"],
        new_asks=["which day is it today", "what month is it", "tell me the date"],
        answer="i have no calendar",
    ),
)


def _hours_later(direction: str, sign: int) -> list[Row]:
    return [
        {
            "gap": "one hour" if gap == 1 else f"{number(gap)} hours",
            "way": direction,
            "from": number(hour),
            "to": number((hour + sign * gap - 1) % 12 + 1),
        }
        for hour in range(1, 13)
        for gap in range(1, 7)
    ]


TIMES = (
    Table(
        asks=[
            "what time is {gap} {way} {from} o'clock", "what is {gap} {way} {from} o'clock",
            "tell me the time {gap} {way} {from} o'clock", "what time is it {gap} {way} {from} o'clock",
            "what is the time {gap} {way} {from} o'clock", "tell me what is {gap} {way} {from} o'clock",
            "do you know what time is {gap} {way} {from} o'clock", "which time is it {gap} {way} {from} o'clock",
            "can you tell me what time is {gap} {way} {from} o'clock", "{gap} {way} {from} o'clock is what time",
        ],
        new_asks=["which time is {gap} {way} {from} o'clock", "tell me what time is {gap} {way} {from} o'clock"],
        answer="{gap} {way} {from} o'clock is {to} o'clock",
        rows=[*_hours_later("after", 1), *_hours_later("before", -1)],
        by_rule=True,
    ),
    Table(
        asks=[
            "how many {small} are in {big}", "how many {small} does {big} have", "how many {small} has {big}",
            "tell me how many {small} {big} has", "do you know how many {small} are in {big}", "{big} has how many {small}",
            "can you tell me how many {small} are in {big}", "tell me how many {small} does {big} have",
        ],
        new_asks=["tell me how many {small} are in {big}", "do you know how many {small} {big} has"],
        answer="{big} has {count} {small}",
        rows=pairs("small big count", """
            seconds a_minute sixty, minutes an_hour sixty, hours a_day twenty_four, days a_week seven, months a_year twelve,
            minutes half_an_hour thirty, seasons a_year four
        """),
    ),
    Table(
        asks=[
            "what time is it", "what is the time", "tell me the time", "do you know what time it is",
            "can you tell me what time it is",
            "tell me what time it is", "what is the time now", "what time is it now", "do you know the time now",
            "do you have the time",
        ],
        new_asks=["do you know the time", "can you tell me the time"],
        answer="i have no clock",
    ),
)  # fmt: skip

_SPELLED = [word for word in [*OBJECTS, *ANIMALS, *COLOURS, *FOODS, *PLACES] if len(word) <= 8]


def _letters(word: str) -> Row:
    return {"word": word, "letters": " ".join(word)}


def _first_letter(word: str) -> Row:
    return {"word": word, "letter": word[0]}


def _num_letters(word: str) -> Row:
    return {"word": word, "count": number(len(word))}


SPELLING = (
    Table(
        asks=[
            "spell {word}",
            "please spell {word}",
            "how do you spell {word}",
            "can you spell {word}",
            "spell the word {word}",
            "how is {word} spelled",
            "tell me how to spell {word}",
            "please spell the word {word}",
            "how do you spell the word {word}",
            "how do we spell {word}",
            "do you know how to spell {word}",
        ],
        new_asks=["can you spell the word {word}", "how do i spell {word}"],
        answer="{letters}",
        rows=[_letters(word) for word in _SPELLED],
        by_rule=True,
        of_word=_letters,
    ),
    Table(
        asks=[
            "what is the first letter of {word}",
            "which letter is the first of {word}",
            "tell me the first letter of {word}",
            "which letter is the first letter of {word}",
            "what letter is first in {word}",
            "do you know the first letter of {word}",
        ],
        new_asks=["which is the first letter of {word}", "what letter is the first of {word}"],
        answer="the first letter of {word} is {letter}",
        rows=[_first_letter(word) for word in _SPELLED],
        by_rule=True,
        of_word=_first_letter,
    ),
    Table(
        asks=[
            "how many letters are in {word}",
            "how many letters does {word} have",
            "how many letters has {word}",
            "tell me how many letters are in {word}",
            "do you know how many letters {word} has",
            "count the letters of {word}",
            "tell me how many letters does {word} have",
            "can you tell me how many letters {word} has",
        ],
        new_asks=["tell me how many letters {word} has", "do you know how many letters are in {word}"],
        answer="{word} has {count} letters",
        rows=[_num_letters(word) for word in _SPELLED],
        by_rule=True,
        of_word=_num_letters,
    ),
)
