"""Fill-in-the-middle (FIM): documents split in three, so that a model learns to write the middle from both ends."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.text.tokenizers import NullTokenizer, Tokenizer


@dataclass(frozen=True)
class FillInTheMiddle:
    """Permutes each document of a sample with probability ``rate``, split at two random places between its tokens.

    - prefix-suffix-middle: PREFIX prefix SUFFIX suffix MIDDLE middle
    - suffix-prefix-middle, for a share ``spm_rate``: PREFIX SUFFIX suffix MIDDLE prefix middle

    Tokens are moved, never decoded, so no text is lost or spelled differently.
    """

    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    spm_rate: float = 0.5

    def __post_init__(self) -> None:
        if len({self.prefix, self.middle, self.suffix}) < 3:
            raise ValueError("--fim-prefix-token, --fim-middle-token and --fim-suffix-token must be three tokens")

    def __call__(self, ids: NDArray[np.int64], eod: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Permute the documents of ``ids`` [n]; the three added tokens of each push as many off the end."""
        ends = np.flatnonzero(ids == eod)
        documents = np.split(ids, np.unique(np.concatenate([ends, ends + 1])))  # each eod is a separate part
        permuted = [self._permute(part, random) if len(part) and part[0] != eod else part for part in documents]
        return np.concatenate(permuted)[: len(ids)]

    def _permute(self, document: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        if random.random() >= self.rate:
            return document
        first, second = sorted(random.integers(len(document) + 1, size=2).tolist())
        prefix, middle, suffix = document[:first], document[first:second], document[second:]
        if random.random() < self.spm_rate:
            return np.concatenate([[self.prefix, self.suffix], suffix, [self.middle], prefix, middle])
        return np.concatenate([[self.prefix], prefix, [self.suffix], suffix, [self.middle], middle])


def find_token(tokenizer: Tokenizer, name: str, flag: str) -> int:
    """Return the id of the token ``name``, which may also be a number. Raises ValueError, which names ``flag``."""
    if name.isdecimal():
        ids = [int(name)]
    elif isinstance(tokenizer, NullTokenizer):
        ids = []  # its texts are numbers
    else:
        ids = tokenizer.tokenize(name, add_special_tokens=False)
        if len(ids) > 1 and tokenizer.detokenize(ids[-1:]).strip() == name:  # SentencePiece puts a blank before it
            ids = ids[-1:]
    if len(ids) != 1 or ids[0] >= tokenizer.vocab_size:
        raise ValueError(f"--fim-data requires {flag}, and {name!r} is not a token of this tokenizer: name another")
    return ids[0]
