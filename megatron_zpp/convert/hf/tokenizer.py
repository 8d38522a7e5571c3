"""Write our tokenizers as files that transformers' AutoTokenizer reads, and find tokenizers in its folders."""

import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.data.text import description
from megatron_zpp.data.text.tik_tokenizer import TikTokenizer
from megatron_zpp.data.text.tokenizers import (
    TOKENIZER_FLAGS,
    HuggingFaceTokenizer,
    MegatronSentencePieceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
    huggingface_path,
)
from megatron_zpp.files import read_json_object

from .files import write_json

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"),
)


def build(settings: Mapping[str, Any]) -> Tokenizer:
    return build_tokenizer(**{name: settings.get(name) for name in TOKENIZER_FLAGS})  # type: ignore[arg-type]


def build_kept(settings: Mapping[str, Any], checkpoint: Path, meta: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a checkpoint's ``settings``. Raises ValueError if it is not the one trained with."""
    tokenizer = build(settings)
    here = description.describe_tokenizer(settings["tokenizer_type"], tokenizer)
    if "tokenizer" not in meta and (here["prefix"] or here["suffix"]):
        assumed = description.format_description(here)
        print(f"note: {checkpoint} does not say how its texts were tokenized; assuming {assumed}", file=sys.stderr)
    description.check_same_tokenizer(str(checkpoint), meta.get("tokenizer"), here)
    return tokenizer


def write_tokenizer(settings: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> dict[str, int]:
    """Write a run's tokenizer; return ids for config.json. Raises ValueError if transformers' results differ."""
    match settings["tokenizer_type"]:
        case "HuggingFaceTokenizer" | "HFTokenizer":
            adds = not settings.get("tokenizer_hf_no_include_special_tokens")
            _copy_tokenizer(huggingface_path(settings["tokenizer_model"]), tokenizer, adds, folder)
        case "GPT2BPETokenizer":
            shutil.copyfile(settings["vocab_file"], folder / "vocab.json")
            shutil.copyfile(settings["merge_file"], folder / "merges.txt")
            end = "<|endoftext|>"
            tokens = {"bos_token": end, "eos_token": end, "unk_token": end}
            write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"} | tokens)
        case kind if isinstance(tokenizer, SentencePieceTokenizer | MegatronSentencePieceTokenizer):
            _write_sentencepiece(Path(settings["tokenizer_model"]), tokenizer, folder)
        case "TikTokenizer":
            assert isinstance(tokenizer, TikTokenizer)
            names = {i: tokenizer.names.get(i, f"<SPECIAL_{i}>") for i in sorted(tokenizer.special.ids)}  # Megatron's
            tokens = dict(zip(("eos_token", "bos_token"), tokenizer.names.values(), strict=False))
            _write_byte_level(folder, tokenizer.ranks, names, tokens, tokenizer.pattern)
        case "ByteTokenizer":
            end = "<|endoftext|>"
            _write_byte_level(folder, {bytes([i]): i for i in range(256)}, {tokenizer.eod: end}, {"eos_token": end})
        case "NullTokenizer":  # has no text
            return {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
        case kind:
            raise ValueError(f"a {kind} cannot be written for transformers: export the weights alone, --no-tokenizer")
    return _check(tokenizer, settings["tokenizer_type"], folder)


def _check(tokenizer: Tokenizer, kind: str, folder: Path) -> dict[str, int]:
    """Compare with transformers on fixed texts, and on texts of random ids."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    draw = random.Random(0)
    ids = [[draw.randrange(tokenizer.vocab_size) for _ in range(20)] for _ in range(200)]
    for text in (*description.SAMPLE_TEXTS, *map(tokenizer.detokenize, ids)):
        if any(token in text for token in theirs.all_special_tokens):
            continue  # transformers reads it as the token; ours may read it as text
        expected, got = tokenizer.tokenize(text), theirs(text)["input_ids"]
        if got != expected:
            differs = f"{text!r} is {expected[:12]} here and would be {got[:12]} there"
            raise ValueError(f"this {kind} cannot be written for transformers: {differs}; give --no-tokenizer")
    if theirs.eos_token_id != tokenizer.eod:
        ends = f"documents end with id {tokenizer.eod} here, and with {theirs.eos_token_id} in transformers"
        raise ValueError(f"{ends}: set eos_token in tokenizer_config.json beside the tokenizer.json")
    begin = theirs.bos_token_id
    return {"bos_token_id": tokenizer.eod if begin is None else begin, "eos_token_id": tokenizer.eod}


def _copy_tokenizer(path: Path, tokenizer: Tokenizer, adds_special_tokens: bool, folder: Path) -> None:
    source = path if path.is_dir() else path.parent
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if path.is_file():
        shutil.copyfile(path, folder / "tokenizer.json")
    if not adds_special_tokens:
        library = read_json_object(folder / "tokenizer.json")
        write_json(folder / "tokenizer.json", library | {"post_processor": None})
    file = folder / "tokenizer_config.json"
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if file.exists():
        config = read_json_object(file)
    if config.get("eos_token") is None:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        config["eos_token"] = next(name for name, i in tokenizer.vocabulary.items() if i == tokenizer.eod)
        write_json(file, config)


def _save(tokenizer: Any, folder: Path, special: dict[str, str]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config | special)


def _write_sentencepiece(
    model: Path, ours: SentencePieceTokenizer | MegatronSentencePieceTokenizer, folder: Path
) -> None:
    """Write a SentencePiece model without normalization. ``_check`` refuses others, which come out different."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(processor.get_piece_size())
    pieces = [processor.id_to_piece(i) for i in ids]
    scores = [processor.get_score(i) for i in ids]
    special = [i for i in ids if processor.is_control(i) or processor.is_unknown(i)]
    unknown, has_bytes = processor.unk_id(), any(map(processor.is_byte, ids))
    ordinary = [i for i in ids if i not in special and not processor.is_byte(i) and not processor.is_unused(i)]
    if all(scores[i] == int(scores[i]) for i in ordinary):  # BPE: minus the order of the merges; else: log likelihoods
        known = {pieces[i] for i in ordinary}
        merges = [
            (left, right)
            for i in sorted(ordinary, key=lambda i: -scores[i])
            for left, right in ((pieces[i][:cut], pieces[i][cut:]) for cut in range(1, len(pieces[i])))
            if left in known and right in known
        ]
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        options = {"unk_token": pieces[unknown], "fuse_unk": True, "byte_fallback": has_bytes}
        result = Tokenizer(models.BPE(vocabulary, merges, **options))
    else:
        scored = list(zip(pieces, scores, strict=True))
        result = Tokenizer(models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes))
    blank_first = processor.normalize("a") == "▁a"
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if blank_first else ([], [])
    result.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    result.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    result.add_special_tokens([AddedToken(pieces[i], normalized=False) for i in special])
    if isinstance(ours, MegatronSentencePieceTokenizer):
        result.add_special_tokens([AddedToken(token, normalized=False) for token in ours.tokens])  # new ones in order
    if ours.special.prefix:
        begin = pieces[processor.bos_id()]
        result.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, processor.bos_id())]
        )
    tokens = {"bos_token": ours.special.bos, "eos_token": ours.eod, "pad_token": ours.special.pad, "unk_token": unknown}
    _save(result, folder, {name: str(result.id_to_token(i)) for name, i in tokens.items() if i is not None})
    shutil.copyfile(model, folder / "tokenizer.model")


def _write_byte_level(
    folder: Path,
    ranks: Mapping[bytes, int],
    names: Mapping[int, str],
    special: dict[str, str],
    pattern: str | None = None,
) -> None:
    """Write byte-level BPE with the merges that follow from the order of the tokens.

    names: of special ids. special: for tokenizer_config.json. pattern: of words; None: texts are not cut.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    tokens = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [(tokens[left], tokens[right]) for _, _, left, right in sorted(pairs)]
    vocabulary = {tokens[token]: rank for token, rank in ranks.items()} | {name: i for i, name in names.items()}
    # A word that is a token becomes it, even where no merges lead there.
    result = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    words = []
    if pattern is not None:
        try:
            regex = Regex(pattern.replace("}+", "}"))  # possessive there; here it would repeat the repetition
        except Exception as error:
            cannot = f"--tiktoken-pattern cannot be written for transformers ({error})"
            raise ValueError(f"{cannot}; give --no-tokenizer") from error
        words = [pre_tokenizers.Split(regex, "isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(name, normalized=False) for name in names.values()])
    _save(result, folder, special)


def find_tokenizer(folder: Path) -> dict[str, str]:
    """Return the flags of the tokenizer in a folder of transformers, by field name; {} if there is none."""
    folder = folder.absolute()
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if (folder / "tokenizer.model").is_file():
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / "tokenizer.model")}
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if vocabulary.is_file() and merges.is_file():
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocabulary), "merge_file": str(merges)}
    return {}
