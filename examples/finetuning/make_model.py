"""Make what fine-tuning starts from: a tiny Hugging Face Llama with random weights, and 100 chats to teach it.

    python examples/finetuning/make_model.py --output runs/finetuning

writes runs/finetuning/model and runs/finetuning/chats.jsonl. Nothing is downloaded. The facts in the chats are made up:
a model that knows them has learned them from these chats.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

NUM_CHATS = 100
SYLLABLES = ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu", "ve", "zi")
SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>"]
# What stands between generation and endgeneration is what the assistant says: it alone has loss in training. Its end
# token must be among it, or the model never learns to stop.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}"
    "<|user|>{{ message.content }}<|end|>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_chats() -> list[list[dict[str, str]]]:
    """Make up one question and answer for each of NUM_CHATS names."""
    draw = random.Random(0)
    names = draw.sample([*itertools.product(SYLLABLES, repeat=3)], NUM_CHATS)
    chats = []
    for name in names:
        person, city = "".join(name).capitalize(), "".join(draw.choices(SYLLABLES, k=2)).capitalize()
        question = {"role": "user", "content": f"Where does {person} live?"}
        answer = f"{person} lives in {city}" + draw.choice([".", " and keeps bees.", ", in a house by the old harbor."])
        chats.append([question, {"role": "assistant", "content": answer}])
    return chats


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Hugging Face model, and chats to fine-tune it on.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    chats = make_chats()
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    tokenizer = make_tokenizer([message["content"] for chat in chats for message in chat])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    set_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(f"{folder / 'model'}: a Llama with {len(tokenizer)} tokens; {folder / 'chats.jsonl'}: {len(chats)} chats")


if __name__ == "__main__":
    main()
