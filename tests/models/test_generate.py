"""Texts written with kept keys and values, many at a time, against one forward pass over the text for each id."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.generate import Drawing, draw, generate
from megatron_zpp.models.moe import MoEConfig
from tests.families.toy import Toy, ToyConfig
from tests.models.configs import gpt_config, llama_config

VOCAB, CONTEXT = 64, 16
EXPERTS = MoEConfig(4, 16, expert_capacity_factor=0.5)
OPEN = dict(tie_embeddings=False)  # a model with tied embeddings repeats itself
MODELS = {
    "gpt": (Decoder, gpt_config(2, 32, 4, VOCAB, CONTEXT, **OPEN)),
    "llama": (Decoder, llama_config(2, 32, 4, VOCAB, num_query_groups=2, qk_layernorm=True, **OPEN)),
    "window": (Decoder, llama_config(2, 32, 4, VOCAB, window_size=5, **OPEN)),
    "yarn": (
        Decoder,
        llama_config(
            *(2, 32, 4, VOCAB),
            **dict(position_embedding_type="yarn", yarn_scaling_factor=4.0, yarn_original_context=8, **OPEN),
        ),
    ),
    "no positions": (Decoder, gpt_config(2, 32, 4, VOCAB, position_embedding_type="none", **OPEN)),
    "experts": (Decoder, llama_config(2, 32, 4, VOCAB, moe=EXPERTS, **OPEN)),
    "from outside": (Toy, ToyConfig(2, 32, 4, VOCAB)),
}
PROMPTS = [[5], list(range(20, 32)), [7, 9, 11], list(range(40, 60))]  # the last is longer than the context


def make(kind: str) -> torch.nn.Module:
    """In fp64, so that rounding decides nothing."""
    module, config = MODELS[kind]
    model = module(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return model


def one_by_one(model, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """The likeliest ids behind one prompt and their logits [steps, V]: the whole text is read for each of them."""
    ids, begin, logits = list(prompt), 0, []
    for _ in range(steps):
        while len(ids) - begin > CONTEXT:
            begin += CONTEXT // 2
        with torch.no_grad():
            logits.append(model(torch.tensor([ids[begin:]]))[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)


def write(model, prompts, steps, *, ends=(), vocab_size=VOCAB, drawing=None, **how) -> list[list[int]]:
    """Return the text after each prompt."""
    drawing = drawing or Drawing(temperature=0)
    texts: list[list[int]] = [[] for _ in prompts]
    written = generate(
        model, prompts, steps, vocab_size=vocab_size, context_length=CONTEXT, ends=ends, drawing=drawing, **how
    )
    for ids in written:
        for text, i in zip(texts, ids, strict=True):
            text += [] if i is None else [i]
    return texts


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_texts_are_those_of_whole_passes(kind, cached):
    whole = make(kind)
    if kind == "experts":  # a text must not depend on how many tokens stand beside its own
        for layer in whole.layers:
            layer.mlp.config = dataclasses.replace(EXPERTS, expert_capacity_factor=None)
    expected = [one_by_one(whole, prompt, 40) for prompt in PROMPTS]  # beyond the context, and again twice
    model, seen = make(kind), []
    model.register_forward_hook(lambda module, inputs, logits: seen.append(logits[:, -1]))
    assert write(model, PROMPTS, 40, cached=cached) == [text for text, _ in expected]
    logits = torch.stack(seen).view(40, len(PROMPTS), VOCAB)
    torch.testing.assert_close(logits, torch.stack([logits for _, logits in expected], dim=1), rtol=0, atol=1e-5)
    assert logits.std(dim=(0, 1)).min() > 0.01  # which words were read matters


def test_a_step_reads_one_id_per_text():
    model, read = make("gpt"), []
    model.register_forward_pre_hook(lambda _, inputs: read.append(tuple(inputs[0].shape)))
    write(model, PROMPTS[:3], 4)
    assert read == [(3, 12), (3, 1), (3, 1), (3, 1)]


def test_a_text_ends_alone():
    prompts = PROMPTS[:3]
    expected = write(make("llama"), prompts, 30)
    end = expected[1][3]
    stops = [text.index(end) + 1 if end in text else 30 for text in expected]
    assert len(set(stops)) > 1
    texts = write(make("llama"), prompts, 30, ends={end})
    assert texts == [text[:stop] for text, stop in zip(expected, stops, strict=True)]


def test_a_seed_gives_a_text_the_same_words_alone_and_beside_others():
    drawing = Drawing(temperature=1.5, top_k=20, top_p=0.9, seed=8)
    beside = write(make("llama"), PROMPTS, 30, drawing=drawing)
    alone = [
        write(make("llama"), [prompt], 30, drawing=dataclasses.replace(drawing, seed=8 + number))[0]
        for number, prompt in enumerate(PROMPTS)
    ]
    assert beside == alone
    twice = write(make("llama"), [[5], [5]], 30, drawing=drawing)
    assert twice[0] != twice[1]


def drawn(shares: list[float], **how) -> dict[int, Any]:
    """How often each id is drawn."""
    generator, draws = torch.Generator().manual_seed(0), 2000
    logits = torch.tensor(shares).log()
    ids = torch.tensor([draw(logits, Drawing(**how), generator) for _ in range(draws)])
    return {i: pytest.approx(count / draws, abs=0.04) for i, count in enumerate(ids.bincount().tolist()) if count}


def test_ids_are_drawn_from_the_likeliest():
    shares = [0.1, 0.4, 0.2, 0.3]
    assert drawn(shares) == {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}
    for how in (dict(top_k=1), dict(top_p=0.3), dict(temperature=0)):
        assert drawn(shares, **how) == {1: 1}
    for how in (dict(top_k=2), dict(top_p=0.5)):
        assert drawn(shares, **how) == {1: 4 / 7, 3: 3 / 7}
    assert drawn(shares, top_p=0.75) == {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}
    assert drawn(shares, temperature=0.5) == {0: 1 / 30, 1: 16 / 30, 2: 4 / 30, 3: 9 / 30}
    # The first of the two likeliest has 4/7: top-p counts what top-k left.
    assert drawn(shares, top_k=2, top_p=0.55) == {1: 1}


def test_padding_of_the_vocabulary_is_never_drawn():
    free = write(make("gpt"), [[1]], 30)[0]
    limited = write(make("gpt"), [[1]], 30, vocab_size=max(free))[0]
    assert limited != free and max(limited) < max(free)
