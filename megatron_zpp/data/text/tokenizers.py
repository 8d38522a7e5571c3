"""Tokenizers: text to ids and back, and the end-of-document id.

``build_tokenizer`` is the one entry. Llama2Tokenizer puts a beginning of sequence (BOS) in front of each text, and
HuggingFaceTokenizer what its post-processor puts around it, as Megatron's do.
"""

import contextlib
import inspect
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.text import special_tokens
from megatron_zpp.data.text.packages import load_package
from megatron_zpp.data.text.special_tokens import SpecialTokens
from megatron_zpp.data.text.tik_tokenizer import ALL_KINDS, TikTokenizer

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins what the assistant says in a chat template
MODEL = re.compile(r"[\w.-]+(/[\w.-]+)?")  # a model's name at Hugging Face

Ids = Sequence[int] | NDArray


class Tokenizer(Protocol):
    """The interface of a tokenizer for the data tools and the trainer."""

    vocab_size: int  # ids are below it; not padded
    eod: int  # the id that ends a document
    special: SpecialTokens

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text; add_special_tokens: between ``special.prefix`` and ``special.suffix``."""
        ...

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        """Tokenize many texts, faster; in one thread, so that several processes don't compete for the cores."""
        ...

    def detokenize(self, ids: list[int]) -> str: ...


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
    tokenizer_hf_no_include_special_tokens: bool | None = None,
) -> Tokenizer:
    """Build the tokenizer that Megatron's flags of these names describe. Raises ValueError, OSError or ImportError."""

    def file(flag: str, value: str | None) -> Path:
        path = _existing_path(tokenizer_type, flag, value)
        if not path.is_file():
            raise ValueError(f"{flag} {value} is not a regular file")
        return path

    match tokenizer_type:
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            return SentencePieceTokenizer(
                file("--tokenizer-model", tokenizer_model), tokenizer_type == "Llama2Tokenizer"
            )
        case "MegatronSentencePieceTokenizer":
            return MegatronSentencePieceTokenizer(file("--tokenizer-model", tokenizer_model))
        case "HuggingFaceTokenizer" | "HFTokenizer":
            return HuggingFaceTokenizer(huggingface_path(tokenizer_model), not tokenizer_hf_no_include_special_tokens)
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(file("--vocab-file", vocab_file), file("--merge-file", merge_file))
        case "TikTokenizer":
            model = file("--tokenizer-model", tokenizer_model)
            return TikTokenizer(model, tiktoken_pattern, vocab_size)
        case "ByteTokenizer":
            return ByteTokenizer()
        case "NullTokenizer":
            if vocab_size is None:
                raise ValueError("NullTokenizer requires --vocab-size, the number of ids in the data")
            return NullTokenizer(vocab_size)
    raise ValueError(f"unknown --tokenizer-type {tokenizer_type}; see megatron-zpp preprocess-data --help")


TOKENIZER_FLAGS = tuple(inspect.signature(build_tokenizer).parameters)


def _load_sentencepiece(model: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{model} is not a SentencePiece model") from error


def _without_text(processor: Any) -> frozenset[int]:
    """Return the ids of a SentencePiece model that transformers takes as special once it is exported."""
    ids = range(processor.get_piece_size())
    return frozenset(i for i in ids if processor.is_control(i) or processor.is_unknown(i))


class SentencePieceTokenizer:
    """A SentencePiece model; documents end with its ``</s>``. add_bos: begin each text with ``<s>``, as Llama's."""

    def __init__(self, model: Path, add_bos: bool) -> None:
        self._processor = processor = _load_sentencepiece(model)
        self.vocab_size: int = processor.get_piece_size()
        self.eod: int = processor.eos_id()
        bos, pad = (i if i >= 0 else None for i in (processor.bos_id(), processor.pad_id()))
        if self.eod < 0:
            raise ValueError(f"{model} has no end-of-sequence id to end documents with; train it with one")
        if add_bos and bos is None:
            raise ValueError(f"{model} has no beginning-of-sequence id; use GPTSentencePieceTokenizer, which adds none")
        prefix = (bos,) if add_bos and bos is not None else ()
        self.special = SpecialTokens(self.eod, bos, pad, prefix, ids=_without_text(processor))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._processor.encode(text, add_bos=bool(self.special.prefix) and add_special_tokens)

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return self._processor.encode(texts, add_bos=bool(self.special.prefix), num_threads=1)

    def detokenize(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class MegatronSentencePieceTokenizer:
    """A SentencePiece model as Megatron-LM's SentencePieceTokenizer read it until February 2026 (--legacy-tokenizer).

    It adds ``<CLS> <SEP> <EOD> <MASK>`` and what the model lacks of PAD, BOS and EOS behind the model's ids. Documents
    end with ``<EOD>``. A text that spells one of these becomes that token.
    """

    def __init__(self, model: Path) -> None:
        self._processor = processor = _load_sentencepiece(model)
        first = processor.get_piece_size()
        known = {processor.id_to_piece(i): i for i in range(first)}
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        controls = {"<PAD>": processor.pad_id(), "<BOS>": processor.bos_id(), "<EOS>": processor.eos_id()}
        names += [processor.id_to_piece(i) if i >= 0 else name for name, i in controls.items()]
        added = [name for name in names if name not in known]
        known |= {name: first + i for i, name in enumerate(added)}
        self.tokens: dict[str, int] = {name: known[name] for name in names}
        self.vocab_size, self.eod = len(known), known["<EOD>"]
        ids = _without_text(processor) | frozenset(self.tokens.values())
        self.special = SpecialTokens(self.eod, known[names[5]], known[names[4]], ids=ids, sources={"eod": "<EOD>"})
        self._spelled = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._names = {i: name for name, i in self.tokens.items()}

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self._spelled.split(text):
            ids += [self.tokens[part]] if part in self.tokens else self._processor.encode(part)
        return ids

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        text, part = "", list[int]()
        for i in ids:
            if i in self._names:
                text, part = text + self._processor.decode(part) + self._names[i], []
            else:
                part.append(i)
        return text + self._processor.decode(part)


class _LibraryTokenizer:
    """A tokenizer of the package tokenizers. add_special_tokens: a text gets what its post-processor puts around it."""

    def __init__(self, tokenizer: Any, add_special_tokens: bool = False) -> None:
        self._tokenizer, self._adds = tokenizer, add_special_tokens
        tokenizer.no_truncation()  # a saved tokenizer may truncate or pad, but documents must stay whole
        tokenizer.no_padding()
        self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocabulary.values(), default=-1) + 1

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=self._adds and add_special_tokens).ids

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        # One thread where the environment says TOKENIZERS_PARALLELISM=false, which the library reads.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._adds)]

    def detokenize(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A ``tokenizer.json``, or a model folder that holds one; ``huggingface_path`` finds them by a model's name.

    Its special tokens are the ones that transformers finds in the files beside it. Where these name no EOS, a document
    ends with the first special token among the ends in ``generation_config.json`` or ``config.json``; without one, with
    the first of ``KNOWN_EOD_TOKENS`` that the vocabulary has. As in the library, a text that spells a special token
    becomes that token.
    """

    def __init__(self, path: Path, add_special_tokens: bool = True) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; HuggingFaceTokenizer reads a tokenizer.json")
        library = load_package("tokenizers", "HuggingFaceTokenizer", "hf")
        try:
            tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception for anything it can't read
            raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
        beside = special_tokens.read_beside(file.parent)
        named, sources, conflict = special_tokens.named_tokens(beside)
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in special_tokens.added_tokens(beside, named):
            if token["content"] not in known:  # as in transformers: a new one gets the next id
                known.add(token["content"])
                tokenizer.add_tokens([library.AddedToken(**token)])
        super().__init__(tokenizer, add_special_tokens)
        self.file = file
        self._chats: Any = None  # transformers' tokenizer, from the first chat on
        bos, pad = (self.vocabulary.get(named.get(name, "")) for name in ("bos", "pad"))
        special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        eod, others = special_tokens.find_eod(beside, named, sources, self.vocabulary, special_ids)
        if eod is None:
            where = file.parent / "tokenizer_config.json"
            raise ValueError(f'{file} has no known end-of-document token; name its "eos_token" in {where}')
        conflict = conflict or others
        self.eod = eod
        # "a" alone, and between what the post-processor adds.
        bare, around = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, add_special_tokens))
        first = next((i for i in range(len(around)) if around[i : i + len(bare)] == bare), 0)
        prefix, suffix = tuple(around[:first]), tuple(around[first + len(bare) :])
        conflict = conflict and f"in {file.parent}, {conflict}"
        self.special = SpecialTokens(eod, bos, pad, prefix, suffix, special_ids, sources, conflict)
        size = beside["config.json"].get("vocab_size")
        if isinstance(size, int) and size < self.vocab_size:
            model = f"the model of {file.parent / 'config.json'}"
            raise ValueError(f"{file} has ids up to {self.vocab_size - 1}, but {model} only {size}")
        for character in ALL_KINDS:
            if unicodedata.category(character)[0] in "LNPS" and not self.tokenize(character, add_special_tokens=False):
                lost = f"{file} leaves characters out that it does not know, such as {character!r}"
                raise ValueError(f"{lost}: give its model an unknown token or all bytes")

    def apply_chat_template(self, chats: list[list[dict[str, str]]]) -> list[str]:
        """Format chats by the chat template, up to where the answer begins. Raises ValueError."""
        library = self._with_template()
        with _errors_of_template():
            return [library.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def training_template(self) -> str:
        """Return the chat template. Raises ValueError unless it marks what the assistant says; ImportError."""
        library = self._with_template()
        with _errors_of_template():
            template: str = library.get_chat_template()
        if not GENERATION.search(template):
            unmarked = f"the chat template in {self.file.parent} does not mark what the assistant says"
            remedy = "put {% generation %} and {% endgeneration %} around it (docs/reference/chats.md)"
            raise ValueError(f"{unmarked}: {remedy}")
        return template

    def tokenize_chats(self, chats: list[list[dict[str, Any]]]) -> list[NDArray[np.int64]]:
        """Format and tokenize chats, lists of messages: ids, and 1 where the assistant speaks, int64 [2, tokens] each.

        The template of the first call stays. Raises ValueError if it refuses a chat, or no assistant speaks in one.
        """
        if self._chats is None:
            self.training_template()
            self._chats = self._with_template()
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        with _errors_of_template():
            encoded = self._chats.apply_chat_template(chats, **options)
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        tokenized = [np.array([ids, mask], dtype=np.int64) for ids, mask in pairs]
        if not all(mask.any() for _, mask in tokenized):
            raise ValueError("the chat template marks no token of this chat as the assistant's")
        return tokenized

    def _with_template(self) -> Any:
        """Load transformers' tokenizer of these files. Raises ValueError if they hold no chat template; ImportError."""
        load_package("transformers", "a chat template", "hf")
        from transformers import PreTrainedTokenizerFast

        with _errors_of_template():
            library = PreTrainedTokenizerFast.from_pretrained(self.file.parent, tokenizer_file=str(self.file))
        if not library.chat_template:
            raise ValueError(f"{self.file.parent} has no chat template (chat_template.jinja)")
        return library


@contextlib.contextmanager
def _errors_of_template() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program: it may divide by zero
        raise ValueError(f"the tokenizer's chat template does not work: {str(error) or repr(error)}") from error


def chat_tokenizer(tokenizer: Tokenizer, tokenizer_type: str) -> HuggingFaceTokenizer:
    """Return ``tokenizer``. Raises ValueError if it is of a type without chat templates."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):  # others read special tokens as text
        raise ValueError(f"{tokenizer_type} has no chat template: docs/tutorials/text-to-chat.md gives a model one")
    return tokenizer


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE; documents end with ``<|endoftext|>``, which inside a text is text."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        load_package("tokenizers", "GPT2BPETokenizer", "hf")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        try:
            model = models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as error:
            raise ValueError(f"{vocab_file} and {merge_file} are not GPT-2 BPE files: {error}") from error
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer)
        missing = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in self.vocabulary]
        if missing:
            raise ValueError(f"{vocab_file} lacks {len(missing)} of the 256 bytes: texts would lose them")
        if "<|endoftext|>" not in self.vocabulary:
            raise ValueError(f"{vocab_file} has no <|endoftext|>; GPT-2's vocab.json has")
        self.eod = end = self.vocabulary["<|endoftext|>"]
        self.special = SpecialTokens(end, end, ids=frozenset([end]))  # GPT-2's BOS is the same token


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 as the end of a document."""

    vocab_size, eod, special = 257, 256, SpecialTokens(256, ids=frozenset([256]))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class NullTokenizer:
    """Texts that are already ids in decimal digits, separated by blanks; the id after the last ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod = vocab_size + 1, vocab_size
        self.special = SpecialTokens(self.eod)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if unknown := [word for word in text.split() if not word.isdecimal()]:
            raise ValueError(f"{unknown[0]!r} is not an id: NullTokenizer reads texts of ids, such as '17 4 256'")
        ids = list(map(int, text.split()))
        if ids and not 0 <= min(ids) <= max(ids) < self.eod:
            raise ValueError(f"ids {min(ids)} to {max(ids)} are not all below --vocab-size {self.eod}")
        return ids

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def huggingface_path(value: str | None) -> Path:
    """Return the path of ``--tokenizer-model``, or the folder of a model of that name in Hugging Face's local cache."""
    if value is None or value.endswith(".json") or Path(value).exists() or not MODEL.fullmatch(value):
        return _existing_path("HuggingFaceTokenizer", "--tokenizer-model", value)
    found = None
    with contextlib.suppress(ImportError):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(value, "tokenizer.json")
    if not isinstance(found, str):
        missing = f"--tokenizer-model {value} does not exist, and Hugging Face's cache has no model of that name"
        raise FileNotFoundError(f"{missing}: hf download {value} tokenizer.json tokenizer_config.json")
    return Path(found).parent


def _existing_path(tokenizer_type: str, flag: str, value: str | None) -> Path:
    if value is None:
        raise ValueError(f"{tokenizer_type} requires {flag}")
    if not Path(value).exists():
        raise FileNotFoundError(f"{flag} {value} does not exist")
    return Path(value)
