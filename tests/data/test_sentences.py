"""Sentences by rules."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.text.corpus import split_sentences

SENTENCES = [
    "Dr. J. Smith met Mrs. Jones, e.g. at 3.14 p.m. on Jan. 5.",
    "“Where?” she asked.",
    "(He did not know!)",
    "It was vol. 2 of X et al. and so on... and more.",
    "Really?!",
    "Ünder the tree.",
    "12 men came.",
    "No full stop here",
    "the next paragraph is one of its own.",
    "and the next.",
    "这是一句。",
    "“第二句！”",
    "End",
]
BETWEEN = [" ", "  ", " ", "\n", "\t", " ", " ", "\n\n", "\n\n", "\n \n", "", "", ""]


def test_sentences_are_found():
    text = "".join(sentence + blanks for sentence, blanks in zip(SENTENCES, BETWEEN, strict=True))
    assert split_sentences(text) == SENTENCES
    kept = [sentence + blanks for sentence, blanks in zip(SENTENCES, BETWEEN, strict=True)]
    assert split_sentences(text, keep_blanks=True) == kept


def test_a_text_without_sentences():
    assert split_sentences("") == split_sentences(" \n\n ") == []
    assert split_sentences("\n\nA", keep_blanks=True) == ["\n\n", "A"]
    assert split_sentences("only this") == ["only this"]


@given(st.text(alphabet="aB.?! \n\"'()。1é"))
def test_nothing_is_lost(text):
    assert "".join(split_sentences(text, keep_blanks=True)) == text
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())
