"""Rewriting of text by rules: at each position the first rule that matches says what is spoken.

Every character of the text belongs to one fragment, so what is spoken can be traced to it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Speak = Callable[[str], str]
"""Function that reads a part of a match, such as the text of a link, by the same rules."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for speaking a part of a text. `pattern`: regular expression of the part. `say`: returns
    what is spoken for a match; the second argument speaks parts of the match by all rules.
    """

    pattern: str
    say: Callable[[re.Match[str], Speak], str]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a text, and what is spoken for it; "" if nothing is."""

    source: str
    spoken: str


def says(words: str) -> Callable[[re.Match[str], Speak], str]:
    """Return a `Rule.say` that always says `words`."""
    return lambda _match, _speak: words


class RuleSet:
    """Rules in order of priority; text that no rule matches is spoken as it is."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [(re.compile(rule.pattern), rule.say) for rule in rules]
        self._any = re.compile(
            "|".join(f"(?P<rule{number}>{rule.pattern})" for number, rule in enumerate(rules))
        )

    def fragments(self, text: str) -> list[Fragment]:
        """Return the fragments of a text, which, joined, are the text."""
        found: list[Fragment] = []
        end = 0
        for match in self._any.finditer(text):
            if match.end() == match.start():
                continue
            assert match.lastgroup is not None
            pattern, say = self._rules[int(match.lastgroup.removeprefix("rule"))]
            # Matched again by itself: the groups of the joined pattern are numbered otherwise.
            own = pattern.match(text, match.start())
            assert own is not None and own.end() == match.end()
            found += _unchanged(text[end : match.start()])
            found.append(Fragment(match[0], say(own, self.speak)))
            end = match.end()
        return found + _unchanged(text[end:])

    def speak(self, text: str) -> str:
        return "".join(fragment.spoken for fragment in self.fragments(text))


def _unchanged(text: str) -> list[Fragment]:
    """Return a fragment for each word and each run of white space."""
    return [Fragment(part, part) for part in re.findall(r"\s+|\S+", text)]
