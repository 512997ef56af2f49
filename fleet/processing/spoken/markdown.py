"""Rules that drop the marks of Markdown and HTML, in any language."""

import html
import re

from fleet.processing.spoken.rules import Rule, Speak, says

MID_LINE = "\x01"
"""Character before a text that does not begin a line."""
_LINE_START = r"(?<![^\n])"


def _inner(match: re.Match[str], speak: Speak) -> str:
    """Say the only group that matched."""
    return speak(next(group for group in match.groups() if group is not None))


def _entity(match: re.Match[str], speak: Speak) -> str:
    plain = html.unescape(match[0])
    return " " if plain.isspace() else speak(plain) if plain != match[0] else match[0]


def _code(match: re.Match[str], speak: Speak) -> str:
    """Say the words of a code span: names without their signs."""
    text = next(group for group in match.groups() if group is not None).strip()
    if re.search(r"[\w.+-]+@[\w.-]+|://|^-?\d[\d.,:]*$", text):
        return speak(text)
    text = re.sub(r"\(\)|[(){}\[\]<>;`\"']", " ", text)
    text = re.sub(r"(?<=\w)\.(?=[A-Za-z])", " dot ", text)
    return " ".join(speak(re.sub(r"[_/\\]|(?<=[a-z])(?=[A-Z])", " ", text)).split())


_BLOCKS = (
    Rule(MID_LINE, says("")),
    Rule(_LINE_START + r"[ \t]*(?:[-*_][ \t]*){3,}(?=\n|$)", says("")),
    Rule(_LINE_START + r"[ \t]*\|?[ \t]*:?-{2,}:?[ \t]*(?:\|[ \t:|-]*)?(?=\n|$)", says("")),
    Rule(_LINE_START + r"[ \t]*={3,}[ \t]*(?=\n|$)", says("")),
    Rule(_LINE_START + r"[ \t]*#{1,6}[ \t]+", says("")),
    Rule(r"[ \t]+#+[ \t]*(?=\n|$)", says("")),
    Rule(_LINE_START + r"[ \t]*(?:>(?![\d$=])[ \t]?)+(?:[-*+•‣◦][ \t]+)?", says("")),
    Rule(_LINE_START + r"[ \t]*[-*+•‣◦–][ \t]+\[[ xX]\][ \t]+", says("")),
    Rule(_LINE_START + r"[ \t]*[-*+•‣◦–][ \t]+", says("")),
    Rule(_LINE_START + r"[ \t]*(\d{1,3})[.)][ \t]+", lambda match, _: f"{match[1]}. "),
    Rule(_LINE_START + r"[ \t]*\[\^?[^\]\n]+\]:[ \t]*\S*", says("")),
    Rule(_LINE_START + r"[ \t]*\|[ \t]*", says("")),
    Rule(r"[ \t]*\|[ \t]*(?=\n|$)", says("")),
    Rule(r"[ \t]+\|[ \t]+", says(", ")),
)
_INLINE = (
    Rule(r"!?\[([^\]\n]*)\]\((?:[^()\n]|\([^()\n]*\))*\)", _inner),
    Rule(r"!?\[([^\]\n^]+)\]\[[^\]\n]*\]", _inner),
    Rule(r"\[\^[^\]\n]+\]|【[^】\n]*】", says("")),
    Rule(r"``([^\n]+?)``|`([^`\n]+)`", _code),
    Rule(r"<((?:https?://|mailto:)[^>\s]+|[\w.+-]+@[\w.-]+)>", _inner),
    Rule(r"<!--.*?-->|<br\s*/?>", says(" ")),
    Rule(r"</?[A-Za-z][^<>\n]*>", says("")),
    Rule(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,31});", _entity),
    Rule(r"\\([\\`*_{}\[\]()#+\-.!|>~$])", lambda m, _: m[1] if m[1] in ".!" else ""),
    Rule(r"\$\$", says("")),
    Rule(r"~~|==(?=\w)|(?<=\w)==", says("")),
    Rule(r"(?<=\d)\s?\*\s?(?=\d)", says(" times ")),
    Rule(r"\*{1,3}(?=\S)|(?<=\S)\*{1,3}", says("")),
    Rule(r"(?<!\w)_{1,3}(?=\S)|(?<=[^\s_])_{1,3}(?!\w)", says("")),
    Rule("`", says("")),
    Rule(r"(?<!\S)(?:[:;]-?[)(DPp]|<3)(?!\S)", says("")),
)
EMOJI = (
    Rule(
        r"[0-9#*]\ufe0f?\u20e3|[™®\u200d\u200b\ufeff\ufe0e\ufe0f\u20e3\u2190-\u21ff"
        r"\u2300-\u23ff\u2460-\u24ff\u2580-\u27bf\u2900-\u297f\u2b00-\u2bff\ue000-\uf8ff"
        r"\U0001f000-\U0001faff\U000e0000-\U000e007f]+",
        says(""),
    ),
)
"""Rules for emoji, their modifiers and joiners, pictographs and private-use characters."""
MARKDOWN = (*_BLOCKS, *_INLINE)
