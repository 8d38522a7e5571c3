"""What keeping keys and values is worth to text generation: tokens per second of one thread, in turns.

    python benchmarks/generation.py

Models have random weights, and write 300 tokens behind a prompt of 8 ids, the likeliest ones. That both ways write the
same text is checked. Seconds are the processor's, so that other programs on the machine count less.
"""

import json
import statistics
import time
from typing import Any

import torch
from common import in_turns, new_parser, origin

from megatron_zpp.families import GPT
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.generate import Drawing, generate
from megatron_zpp.models.transformer import Transformer

PROMPT, TOKENS = list(range(8)), 300
MODELS = {  # context, and shape
    "the quickstart's, 0.7M parameters": (128, DecoderConfig(2, 128, 2, 2048, 128)),
    "GPT, 16M parameters": (512, DecoderConfig(6, 384, 6, 8192, 512)),
}


def write(model: Transformer, context: int, rows: int, cached: bool) -> tuple[float, list[list[int | None]]]:
    """Seconds of the processor, and the text."""
    start = time.process_time()
    written = generate(
        model,
        [PROMPT] * rows,
        TOKENS,
        vocab_size=model.config.vocab_size,
        context_length=context,
        ends=(),
        drawing=Drawing(temperature=0),
        cached=cached,
    )
    text = list(written)
    return time.process_time() - start, text


def measure(name: str, rounds: int, rows: int) -> dict[str, Any]:
    """Both ways in turns; the ratio is the median over the turns."""
    context, config = MODELS[name]
    torch.manual_seed(0)
    models = {cached: GPT.build_empty(config).to_empty(device="cpu").eval() for cached in (True, False)}
    with torch.no_grad():
        for parameter in models[True].parameters():
            parameter.normal_(std=0.1)
    models[False].load_state_dict(models[True].state_dict())
    turns = {cached: lambda cached=cached: write(models[cached], context, rows, cached) for cached in models}
    written = in_turns(turns, rounds)
    assert all(text == written[True][0][1] for _, text in written[True] + written[False]), "the texts must be the same"
    seconds = {cached: [taken for taken, _ in written[cached]] for cached in written}
    tokens = rows * TOKENS
    ratios = [again / once for again, once in zip(seconds[False], seconds[True], strict=True)]
    return {
        "model": name,
        "context": context,
        "texts at once": rows,
        "tokens_per_second_cached": round(tokens / statistics.median(seconds[True]), 1),
        "tokens_per_second_uncached": round(tokens / statistics.median(seconds[False]), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(name, args.rounds, rows) for name in MODELS for rows in (1, 8)]
    print(json.dumps({**origin(), "threads": 1, "results": results}, indent=1))


if __name__ == "__main__":
    main()
