"""Evaluation gives the answers of the harness's own HFLM, whatever stands in front of the tokenizer's texts."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import one_hot

from megatron_zpp.commands import evaluate, generate_text
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.convert.hf.checkpoint import save_imported, settings_of_import
from megatron_zpp.convert.hf.tokenizer import build
from megatron_zpp.families import LLAMA, padded_vocab_size
from tests.convert.hf.test_tokenizer import KINDS
from tests.models.configs import llama_config

pytestmark = pytest.mark.integrations
PAIRS = [
    ("The capital of France is", " Paris"),
    ("def f(x):", "\n    return x"),
    ("", "import os"),
    ("Trailing space ", "and more"),
    ("long " * 80, "context"),
]
TEXTS = ["import os\nimport sys\n", "A text of many windows, since it is longer than the context. " * 5]
UNTIL = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}


def answers_of(model) -> tuple[list, list, list]:
    pairs = [SimpleNamespace(args=pair) for pair in PAIRS]
    texts = [SimpleNamespace(args=(text,)) for text in TEXTS]
    prompts = [SimpleNamespace(args=(text, UNTIL)) for text in ("def f(x):", "a", "for i in range(")]
    return model.loglikelihood(pairs), model.loglikelihood_rolling(texts), model.generate_until(prompts)


@pytest.mark.parametrize(
    ("kind", "multiple"), [*((kind, 128) for kind in KINDS), ("huggingface-bos", None)], ids=[*KINDS, "imported"]
)
def test_evaluation_equals_hflm_on_the_exported_model_for_every_tokenizer(tmp_path, kind, multiple):
    """multiple: of the padded vocabulary; None: an imported model, which keeps its rows."""
    from lm_eval.models.huggingface import HFLM

    flags = KINDS[kind](tmp_path)
    tokenizer = build(flags)
    torch.manual_seed(0)
    rows = padded_vocab_size(tokenizer.vocab_size, multiple) if multiple else tokenizer.vocab_size + 5
    config = llama_config(2, 32, 2, rows, ffn_hidden_size=48, num_query_groups=2, kv_channels=16)
    parameters = {  # answers that are far from uniform
        name: torch.randn(tensor.shape) * (0.3 if tensor.dim() > 1 else 0.1) + (tensor.dim() == 1)
        for name, tensor in LLAMA.build_empty(config).state_dict().items()
    }
    argv = [*LLAMA.flags(config, 64), *import_hf.tokenizer_words(flags)]
    argv += ["--make-vocab-size-divisible-by", str(multiple or rows)]
    settings = settings_of_import(LLAMA, config, argv, 64, tokenizer)
    save_imported(
        *(tmp_path / "ours", LLAMA, config, settings, lambda name, _: parameters[name], tokenizer),
        unpadded_vocabulary=multiple is None,
    )
    words = ["--load", str(tmp_path / "ours"), "--output", str(tmp_path / "hf")]
    export_hf.export(export_hf.parse_arguments(words))
    theirs = HFLM(str(tmp_path / "hf"), device="cpu", batch_size=1, dtype="float32", max_length=64)

    args = evaluate.parse_arguments(["--load", str(tmp_path / "ours"), "--eval-tasks", "none", "--device", "cpu"])
    lm = evaluate.load_lm(args, *generate_text.open_checkpoint(args))
    (pairs, rolling, written), (their_pairs, their_rolling, their_written) = answers_of(lm), answers_of(theirs)
    print(kind, [round(x, 3) for x, _ in pairs], [round(x, 3) for x, _ in their_pairs], rolling, their_rolling)
    assert [score for score, _ in pairs] == pytest.approx([score for score, _ in their_pairs], abs=1e-4)
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in their_pairs]
    assert rolling == pytest.approx(their_rolling, abs=1e-4)
    assert written == their_written and any(written)


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
