"""Fine-tuning here and by TRL: the same tokens, masks and loss of the same packed chats."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.finetuning import make_model
from megatron_zpp.checkpoint import find_checkpoint, read_meta
from megatron_zpp.commands.convert import import_hf
from megatron_zpp.commands.data import preprocess_data
from megatron_zpp.commands.generate_text import load_model
from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.loader import make_batch, stack_samples
from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.models.transformer import as_model_output
from megatron_zpp.training.loss import LanguageModelLoss

pytestmark = pytest.mark.integrations
LENGTH, CHATS = 128, 40


def test_the_loss_of_packed_chats_is_that_of_sft_trainer(tmp_path, monkeypatch):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    monkeypatch.setattr(sys, "argv", ["make_model.py", "--output", str(tmp_path)])
    make_model.main()
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()[:CHATS]]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")
    theirs, num_theirs = loss_of_trl(trl, datasets, str(tmp_path / "model"), chats, str(tmp_path / "trl"))

    words = f"--chat --input {tmp_path}/chats.jsonl --output-prefix {tmp_path}/chats"
    words += f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/model"
    preprocess_data.run(preprocess_data.parse_arguments(words.split()))
    arguments = ["--input", str(tmp_path / "model"), "--save", str(tmp_path / "imported")]
    import_hf.import_(import_hf.parse_arguments(arguments), ARCHITECTURES)
    ours, num_ours = loss_of_ours(f"{tmp_path}/chats_messages_chat", str(tmp_path / "imported"))
    assert num_ours == num_theirs
    assert ours == pytest.approx(theirs, rel=1e-5)


def loss_of_trl(trl: Any, datasets: Any, model: str, chats: list, output: str) -> tuple[float, int]:
    """The loss of all chats in one packed batch, and its tokens, by TRL's tokenizing, packing and collating."""
    from transformers import AutoTokenizer

    config = trl.SFTConfig(
        output_dir=output,
        assistant_only_loss=True,
        packing=True,
        max_length=LENGTH + 1,
        per_device_train_batch_size=CHATS,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
    )
    data, tokenizer = datasets.Dataset.from_list(chats), AutoTokenizer.from_pretrained(model)
    trainer = trl.SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    (batch,) = list(trainer.get_train_dataloader())
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), dict(batch))
    return loss.item(), int((batch["labels"] != -100).sum())


def loss_of_ours(prefix: str, load: str) -> tuple[float, int]:
    """The same by ours: the samples of one epoch as a batch."""
    options = SampleOptions(LENGTH, seed=1, reset_position_ids=True, reset_attention_mask=True, sft=True)
    dataset = build_datasets(options, data_path=[prefix], split="1", num_samples=(1, 0, 0)).train
    assert dataset is not None and len(dataset) > 1
    batch = make_batch(stack_samples([dataset[i] for i in range(len(dataset))], LENGTH + 1), options)
    inputs, target = LanguageModelLoss(SimpleNamespace(cp_size=1), torch.device("cpu")).split(batch)
    checkpoint = find_checkpoint(load)
    assert checkpoint is not None
    with torch.no_grad():
        model = load_model(checkpoint, read_meta(checkpoint), torch.device("cpu"))
        losses = as_model_output(model(**inputs)).losses
    return (target.sum(losses) / target.num_tokens).item(), int(target.num_tokens)
