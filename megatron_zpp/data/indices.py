"""Computes the order of samples: Megatron's document, sample and shuffle index.

A split's sequences, repeated for as many epochs as needed and shuffled, form one stream of tokens; sample k is the
stream's tokens k * L to (k + 1) * L inclusive (consecutive samples share one token, the label of one and the input
of the next), and samples are served in shuffled order. Three arrays describe this:

- document index int32 [D]: the shuffled sequence numbers, all epochs;
- sample index [M + 1, 2]: row k = (row of the document index, token offset there) at which sample k begins;
- shuffle index [M]: which sample is served i-th.

``megatron_order`` equals Megatron-LM's to the bit.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray]
Advance = Callable[[int], None]  # takes the number of further rows of the indices that are done

CHUNK = 1 << 15  # documents per step: what fits in a processor's cache


def samples_in(epochs: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Count the whole samples of a stream of ``epochs`` epochs."""
    return (epochs * tokens_per_epoch - 1) // seq_length


def count_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> tuple[int, bool]:
    """Return the epochs that ``num_samples`` take (None: one), and whether Megatron shuffles the last one by itself.

    It does when less than 80 % of it will be used: mixed with the others, its documents would displace theirs.
    """
    # The smallest number whose stream holds the samples and the one label token after the last of them.
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    if num_samples is None or epochs == 1:
        return 1, False
    from_last_epoch = num_samples - samples_in(epochs - 1, tokens_per_epoch, seq_length)
    return epochs, from_last_epoch < int(0.80 * samples_in(1, tokens_per_epoch, seq_length))


def megatron_order(
    lengths: NDArray[np.int32],
    sequences: range,
    epochs: int,
    separate_last_epoch: bool,
    seq_length: int,
    seed: int,
    advance: Advance = lambda rows: None,
) -> Arrays:
    """Build Megatron's three indices of ``sequences``, which hold at least one token; ``lengths`` covers all."""
    tokens_per_epoch = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    random = np.random.RandomState(seed)  # one generator for all shuffles, in this order
    epoch = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    joint = np.tile(epoch, epochs - separate_last_epoch)
    random.shuffle(joint)  # across epochs, as Megatron does
    if separate_last_epoch:
        random.shuffle(epoch)
    document_index = np.concatenate([joint, epoch]) if separate_last_epoch else joint
    advance(len(document_index))
    total = samples_in(epochs, tokens_per_epoch, seq_length)
    sample_index = build_sample_index(lengths, document_index, seq_length, total, advance)
    # A separate last epoch begins after the last sample that lies in the others alone.
    first_part = samples_in(epochs - 1, tokens_per_epoch, seq_length) if separate_last_epoch else total
    shuffle_index = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(shuffle_index[:first_part])
    random.shuffle(shuffle_index[first_part:])
    advance(total)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    advance: Advance = lambda rows: None,
) -> NDArray:
    """Build the sample index [num_samples + 1, 2] of the documents ``document_index`` in a row.

    Row k points to position k * L of the stream: sample k's first token, and sample k - 1's last. It never points past
    a document's end nor to an empty document (but row 0 is always (0, 0)). If the stream ends earlier, the last row
    points to its last token.
    """
    largest = max(len(document_index), int(lengths.max()))
    sample_index = np.empty((num_samples + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    lengths = np.array(lengths)  # copy: in the mapped file they are not aligned, so indexing is slower
    position = 0  # tokens before this chunk of documents
    done = 0  # rows of the sample index before it
    for first in range(0, len(document_index), CHUNK):
        chunk = lengths[document_index[first : first + CHUNK]].astype(np.int64)  # [C]
        ends = position + np.cumsum(chunk)
        # Rows k = 0 ... (end - 1) // L lie before a document's end.
        rows_before_end = np.minimum((ends - 1) // seq_length + 1, num_samples + 1)
        rows = np.diff(rows_before_end, prepend=done)  # [C], per document
        last_done = int(rows_before_end[-1])
        sample_index[done:last_done, 0] = np.repeat(np.arange(first, first + len(chunk)), rows)
        positions = np.arange(done, last_done) * seq_length
        sample_index[done:last_done, 1] = positions - np.repeat(ends - chunk, rows)
        advance(last_done - done)
        position, done = int(ends[-1]), last_done
    if done == num_samples:  # the last sample is cut short
        last_document = int(np.flatnonzero(lengths[document_index])[-1])
        sample_index[done] = last_document, lengths[document_index[last_document]] - 1
    sample_index[0] = 0  # also where the first documents are empty
    return sample_index
