"""Settings of the tokenizer, for the trainer and for the tools, which start without torch."""

from dataclasses import dataclass
from functools import partial

from megatron_zpp.fields import flag

_file = partial(flag, None, metavar="FILE", resume="free")

_NULL = "--tokenizer-type NullTokenizer --vocab-size {vocabulary}"
_WITH_MODEL = (  # tokenizers that --tokenizer-model names
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "MegatronSentencePieceTokenizer", "Llama2Tokenizer"),
    *("HuggingFaceTokenizer", "HFTokenizer", "TikTokenizer"),
)


@dataclass(frozen=True)
class TokenizerSettings:
    """Tokenizer."""

    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer; default GPT2BPETokenizer with --vocab-file",
        choices=(*_WITH_MODEL, "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer"),
        resume="--override-data",
        first="Data",
        in_plans=_NULL,
    )
    tokenizer_model: str | None = flag(
        None,
        "SentencePiece, .tiktoken or JSON file; folder or cached name of a Hugging Face tokenizer",
        metavar="PATH",
        resume="free",
        effective_with=" ".join(f"tokenizer_type={kind}" for kind in _WITH_MODEL),
        tier="stable",
        first="Data",
    )
    vocab_file: str | None = _file(
        "vocab.json of GPT2BPETokenizer", effective_with="tokenizer_type=GPT2BPETokenizer", in_plans=_NULL
    )
    merge_file: str | None = _file("merges.txt of GPT2BPETokenizer", effective_with="tokenizer_type=GPT2BPETokenizer")
    vocab_size: int | None = flag(
        None,
        "vocabulary size of NullTokenizer, and of TikTokenizer with a JSON vocabulary: default 131072",
        at_least=1,
        resume="model",
        first="Data",
    )
    tiktoken_pattern: str | None = flag(
        None,
        "how TikTokenizer cuts words: gpt2, cl100k_base, o200k_base, v1, v2 or a regular expression",
        metavar="P",
        resume="--override-data",
        effective_with="tokenizer_type=TikTokenizer",
    )
    tokenizer_hf_no_include_special_tokens: bool = flag(
        False,
        "HuggingFaceTokenizer puts nothing around a text, such as the BOS of its post-processor",
        resume="--override-data",
        effective_with="tokenizer_type=HuggingFaceTokenizer tokenizer_type=HFTokenizer",
    )
