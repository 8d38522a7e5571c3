"""Make what fine-tuning needs: a tiny Hugging Face Llama with random weights, 100 chats to teach it, and an exam.

    python examples/finetuning/make_model.py --output runs/finetuning

writes model, chats.jsonl, pairs.jsonl and tasks into runs/finetuning. Nothing is downloaded. The facts in the chats are
made up: a model that knows them has learned them from these chats. Pairs prefer the short form of an answer. The tasks,
for lm-evaluation-harness: who lives where (facts), and whether the answer is the short one (short).
"""

import argparse
import itertools
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_zpp.errors import attempt, reports_errors

logging.disable(logging.WARNING)  # torchao's and pytree's, which transformers imports
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed  # noqa: E402

logging.disable(logging.NOTSET)

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
ENDINGS = (".", " and keeps bees.", ", in a house by the old harbor.")  # answers end so; the first is the short form
TASKS = {  # by name: YAML for lm-evaluation-harness, which finds the data from where it is started
    "facts": """task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
    "short": """task: short
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{short}}}}"
target_delimiter: ""
generation_kwargs: {{max_gen_toks: 24, until: []}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""",
}


def make_chats() -> list[list[dict[str, str]]]:
    """Make up one question and answer for each of NUM_CHATS names."""
    draw = random.Random(0)
    names = draw.sample([*itertools.product(SYLLABLES, repeat=3)], NUM_CHATS)
    chats = []
    for name in names:
        person, city = "".join(name).capitalize(), "".join(draw.choices(SYLLABLES, k=2)).capitalize()
        question = {"role": "user", "content": f"Where does {person} live?"}
        answer = f"{person} lives in {city}" + draw.choice(ENDINGS)
        chats.append([question, {"role": "assistant", "content": answer}])
    return chats


def make_pairs(chats: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Make a pair of each chat: the short form of its answer, and a long one."""
    pairs = []
    for number, (question, answer) in enumerate(chats):
        fact = next(answer["content"].removesuffix(end) for end in reversed(ENDINGS) if answer["content"].endswith(end))
        prompt = f"<|user|>{question['content']}<|end|><|assistant|>"  # as the chat template writes it
        rejected = fact + ENDINGS[1 + number % 2]
        pairs.append({"prompt": prompt, "chosen": f"{fact}{ENDINGS[0]}", "rejected": rejected})
    return pairs


def write_tasks(folder: Path, pairs: list[dict[str, str]]) -> None:
    """Write ``TASKS`` and their data: a question's choices are where this person lives, and where three others do."""
    draw, rows = random.Random(1), []
    cities = sorted({pair["chosen"].split()[-1] for pair in pairs})
    for pair in pairs:
        *words, city = pair["chosen"].split()
        choices = [city, *draw.sample([other for other in cities if other != city], 3)]
        draw.shuffle(choices)
        texts = [" ".join([*words, choice]) for choice in choices]
        rows.append({"prompt": pair["prompt"], "choices": texts, "label": choices.index(city), "short": pair["chosen"]})
    folder.mkdir(exist_ok=True)
    write_lines(folder / "facts.jsonl", rows)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "facts.jsonl"), encoding="utf-8")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


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


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Hugging Face model, and chats to fine-tune it on.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    folder = parser.parse_args().output
    with attempt("write", folder):
        write(folder)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chats = make_chats()
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    write_lines(folder / "pairs.jsonl", pairs := make_pairs(chats))
    write_tasks(folder / "tasks", pairs)

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
    sys.exit(main())
