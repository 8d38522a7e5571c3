"""Evaluation gives the answers of the harness's own HFLM, whatever stands in front of the tokenizer's texts."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import one_hot

from megatron_zpp.convert.hf.tokenizer import build
from tests.convert.hf.test_tokenizer import KINDS

pytestmark = pytest.mark.integrations
UNTIL = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}


def test_a_special_token_ends_an_answer_that_is_to_end_with_it(tmp_path):
    """As ``until: ["<|im_end|>"]`` of a chat model whose documents end otherwise. The model writes what is given."""
    from megatron_zpp.integrations.lm_eval import ShardedLM

    tokenizer = build(KINDS["huggingface-bos"](tmp_path))
    special = next(i for i in tokenizer.special.ids if i != tokenizer.eod)
    answer, more = (tokenizer.tokenize(text, add_special_tokens=False) for text in ("yes", " and more"))
    written = [*answer, special, *more, tokenizer.eod]
    for until, expected, passes in ((["<bos>"], "yes", len(answer) + 1), (["s", "<bos>"], "ye", len(answer))):
        left = list(written)

        def logits(texts, left=left):
            return one_hot(torch.full(texts.shape, left.pop(0)), tokenizer.vocab_size).float()

        request = SimpleNamespace(args=("a", UNTIL | {"until": until, "max_gen_toks": 40}))
        assert ShardedLM(logits, tokenizer, length=64, batch_size=1).generate_until([request]) == [expected]
        assert left == written[passes:]
