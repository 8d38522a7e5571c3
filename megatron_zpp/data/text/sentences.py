"""Splits a text into sentences by rules, without a model: the same sentences on every machine."""

from __future__ import annotations

import re

# Where a sentence may end, and the blanks after it: at . ! ? and closing quotes or brackets, if blanks follow; at the
# Chinese and Japanese signs; and at an empty line.
_END = re.compile(
    r"""[.!?\u2026]+["'\u2019\u201d\u00bb)\]]*(?P<after>\s+)"""
    r"""|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*\s*"""
    r"""|[^\S\n]*\n[^\S\n]*\n\s*"""
)
_OPENING = "\"'\u2018\u201c\u00ab([\u00bf\u00a1"
# Words whose full stop ends no sentence, like that of an initial or of a word with a stop inside, such as e.g.
_ABBREVIATIONS = re.compile(
    "mr|mrs|ms|dr|prof|rev|gen|col|lt|sgt|capt|gov|sen|rep|st|jr|sr|vs|inc|ltd|corp|dept|univ|vol|fig|eqs?|pp|eds?|al|"
    "approx|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec",
    re.IGNORECASE,
)


def split_sentences(text: str, keep_blanks: bool = False) -> list[str]:
    """Split a text into its sentences; with ``keep_blanks`` each keeps the blanks that follow it."""
    sentences, start = [], 0
    for end in _END.finditer(text):
        if end["after"] is None or _ends_sentence(text, start, end):
            sentences.append(text[start : end.end()])
            start = end.end()
    sentences.append(text[start:])
    if not keep_blanks:
        sentences = [sentence.strip() for sentence in sentences]
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, end: re.Match[str]) -> bool:
    if end["after"].count("\n") > 1:
        return True
    following = text[end.end() : end.end() + 5].lstrip(_OPENING)[:1]
    if following.islower():
        return False
    words = text[start : end.start()].split()
    before = words[-1].lstrip(_OPENING) if words else ""
    is_stop = text[end.start() : end.start("after")] == "."
    is_short = _ABBREVIATIONS.fullmatch(before) is not None or "." in before or (len(before) == 1 and before.isalpha())
    return not (is_stop and is_short)
