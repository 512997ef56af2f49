"""Length of the silence that ends a turn, by the words before it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from web.realtime.audio.turn_end import WAITS, Eagerness, SentenceEnd, end_of_turn_ms, ending_of

COMPLETE = """
What time is it?|Turn off the lights in the kitchen.|Yes.|No.|Stop!|Okay.|Thanks.|Good morning!
Where are you from?|What are you looking at?|I would like a cup of tea.|Yes, I will.
Tell me what time it is.|I hope not.|Maybe not.|Of course not.|Hello, what is your name?
If it rains tomorrow, we stay at home.|If it rains tomorrow we stay at home.|After dinner.
When does the train leave?|I need eggs, milk and bread.|I need eggs, milk, and bread.
I need eggs, milk, butter and bread.|They sell tea, coffee or hot chocolate.
Set a timer for 15 minutes.|Wake me at 5:30.|Turn it off.|No, no, no.|Can you help me?
Well, I think so too.|He said that he would come. I believed him.|That is all I have today.|Why?
On Monday, March 3, 2025, we met.|Call my brother, please.|Could you repeat that, please?
When you get home call me.|She asked me whether I was happy.|Ich komme morgen.|Merci beaucoup.
Which one would you recommend?|Choose between tea and coffee.|Once a week.
I like it, though.|Tell me a story about a dragon.|I saw it and I said no.
By the way, where is my coat?|If it rains, stay here.|The second one is much better.|When is it?
"""
UNFINISHED = """
I went to the shop and|I went to the shop and.|So|Well,|Um|I think that|I would like to...
Can you book a table for|Can you book a table for?|Please send it to my|The|I
I was wondering|It is|My name is|I want|I need eggs, milk, bread.|apples, pears, plums
If it rains tomorrow.|If my brother comes tomorrow.|When I was a little boy.|Because
The first thing is, um,|I have two questions:|He is older than|I live near
I met him. And|We could go by bus or|Yesterday I saw a|I don't know whether|Give me the
Although it was late.|Ich komme morgen, weil|Je voudrais un|Turn on the lights in the
What is the difference between a lake?|We may|It was Bill and I
When the phone rings.|While my sister was away.
"""
UNCLEAR = """
turn off the lights|I live in|Could you explain?|Tell my brother.|I bought apples, pears.
My number is 555.|my number is 0171-333|what time is it|Set the oven to 9.|It costs two hundred.
I bought a lamp, two chairs.|Can you play?|Do you know?|Hi.|Hello there.
My brother.|The house on the hill.|I lost my keys.|I know who you are.|I've lived in Lima.
"""
UNKNOWN = "|...?!"


def cases(table: str) -> list[str]:
    return [case for line in table.strip("\n").splitlines() for case in line.split("|")]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (COMPLETE, SentenceEnd.COMPLETE),
        (UNFINISHED, SentenceEnd.UNFINISHED),
        (UNCLEAR, SentenceEnd.UNCLEAR),
        (UNKNOWN, SentenceEnd.UNKNOWN),
    ],
)
def test_ending_of_a_transcript(table: str, expected: SentenceEnd) -> None:
    assert {text: ending_of(text) for text in cases(table)} == dict.fromkeys(cases(table), expected)


def test_nothing_is_known_before_the_first_transcript() -> None:
    assert ending_of(None) is SentenceEnd.UNKNOWN


@given(st.text(max_size=60) | st.sampled_from(cases(COMPLETE + UNFINISHED + UNCLEAR)))
def test_wait_depends_on_the_words_and_the_eagerness(text: str) -> None:
    eager: list[Eagerness] = ["high", "medium", "low"]
    whole = [end_of_turn_ms(text, WAITS[each]) for each in eager]
    assert whole == sorted(whole) and len(set(whole)) == 3
    assert WAITS["auto"] == WAITS["medium"]
    assert ending_of(text) is ending_of(f"  {text} ")


@pytest.mark.parametrize("eagerness", ["low", "medium", "high"])
def test_complete_sentence_ends_sooner_and_an_unfinished_one_later(eagerness: Eagerness) -> None:
    texts = ("Turn it off.", "turn it off", "Turn it off and")
    complete, unclear, unfinished = (end_of_turn_ms(text, WAITS[eagerness]) for text in texts)
    assert 2 * complete <= unclear + 200 and 2 * unclear <= unfinished
