"""Training loops of other packages, with a small Llama each; for ``other_loops.py``."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from other_loops import Trained
from other_loops_models import SAMPLES, TOKENS, blocks_of, counting, make_llama
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp


def new_llama() -> tuple[Any, Trained]:
    """A small Llama with the same weights every time, and where to record its training."""
    torch.manual_seed(0)
    llama = make_llama()
    return llama, Trained(sum(parameter.numel() for parameter in llama.parameters()))


def shard(llama: nn.Module, mesh: Any) -> nn.Module:
    """Shard the blocks and the model over a mesh of Lightning's."""
    for block in blocks_of(llama):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(llama, mesh=mesh["data_parallel"])
    return llama


def batch(number: int) -> dict[str, torch.Tensor]:
    """This rank's micro-batch of that number."""
    return counting(torch.Generator().manual_seed(1000 * number + dist.get_rank()))


def accelerate_loop(config: ZeroPPConfig | None, accumulation: int, steps: int) -> Trained:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # left by the setting before
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulation)
    llama, trained = new_llama()
    model, optimizer = accelerator.prepare(llama, torch.optim.AdamW(llama.parameters(), lr=3e-3))
    zeropp = None if config is None else apply_zeropp(model, config)
    for number in range(steps * accumulation):
        with accelerator.accumulate(model):
            loss = model(**batch(number)).loss
            accelerator.backward(loss)
            trained.losses.append(loss.item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                trained.end_step(zeropp)
    return trained


def huggingface_trainer(config: ZeroPPConfig | None, accumulation: int, steps: int) -> Trained:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from megatron_zpp.integrations.huggingface import ZeroPPCallback

    callback = None if config is None else ZeroPPCallback(config)
    llama, trained = new_llama()

    class Recorded(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            trained.losses.append(loss.item() * accumulation)  # which it divides by
            return loss

    class Sent(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trained.end_step(None if callback is None else callback.zeropp)

    generator = torch.Generator().manual_seed(0)
    samples = [counting(generator) for _ in range(steps * accumulation * dist.get_world_size())]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=SAMPLES,
            gradient_accumulation_steps=accumulation,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            fsdp=True,  # type: ignore[arg-type]
            fsdp_config={"version": 2},
        )
        dataset = [{name: tensor[i] for name, tensor in sample.items()} for sample in samples for i in range(SAMPLES)]
        callbacks = [Sent()] if callback is None else [callback, Sent()]
        Recorded(llama, arguments, train_dataset=dataset, callbacks=callbacks).train()  # type: ignore[arg-type]
    return trained


def lightning_trainer(config: ZeroPPConfig | None, accumulation: int, steps: int) -> Trained:
    import pytorch_lightning
    from pytorch_lightning.strategies import ModelParallelStrategy

    llama, trained = new_llama()

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def configure_model(self) -> None:
            assert self.device_mesh is not None  # the strategy's
            shard(self.llama, self.device_mesh)

        def on_fit_start(self) -> None:
            self.zeropp = None if config is None else apply_zeropp(self.llama, config)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

        def training_step(self, numbers: torch.Tensor, index: int) -> torch.Tensor:
            is_last = (index + 1) % accumulation == 0 or self.trainer.is_last_batch
            self.llama.set_is_last_backward(is_last)  # Lightning does not say it
            loss: torch.Tensor = self.llama(**batch(index)).loss
            trained.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, outputs: Any, numbers: torch.Tensor, index: int) -> None:
            if (index + 1) % accumulation == 0:
                trained.end_step(self.zeropp)

    ranks = dist.get_world_size()
    pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(Module(), torch.utils.data.DataLoader(range(steps * accumulation)))  # type: ignore[arg-type]
    return trained


def torchtitan(config: ZeroPPConfig | None, accumulation: int, steps: int) -> Trained:
    """Its debug model with two of six layers, its optimizer, scheduler, data loader, clipping and loss; in fp32."""
    from torchtitan_llama import debug_llama3, write_text_and_tokenizer

    from megatron_zpp.integrations.torchtitan import with_zeropp

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text_and_tokenizer(folder)
        own = debug_llama3(folder)
        own.checkpoint.enable = False
        own.debug.seed = 0
        own.training.steps = steps
        own.training.seq_len, own.training.local_batch_size = TOKENS, SAMPLES
        own.training.global_batch_size = SAMPLES * accumulation * dist.get_world_size()
        own.training.mixed_precision_param = "float32"
        assert own.model_spec is not None
        own.model_spec.model.layers = own.model_spec.model.layers[:2]
        trainer = (own if config is None else with_zeropp(own, config)).build()
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):  # torchtitan wants a factor, which gloo's own reductions lack
                module.set_force_sum_reduction_for_comms(True)
        trained = Trained(sum(parameter.numel() for parameter in trainer.model_parts[0].parameters()))
        record(trainer, accumulation, trained)
        trainer.train()
        trainer.close()
    return trained


def record(trainer: Any, accumulation: int, trained: Trained) -> None:
    """Have torchtitan's trainer record losses of micro-batches and bytes of steps."""
    forward_backward_step, train_step = trainer.forward_backward_step, trainer.train_step

    def recorded_micro_batch(**batch: Any) -> torch.Tensor:
        loss = forward_backward_step(**batch)  # summed, over the number of the step's tokens on all ranks
        trained.losses.append(loss.item() * dist.get_world_size() * accumulation)
        return loss

    def recorded_step(data: Any) -> None:
        train_step(data)
        trained.end_step(getattr(trainer, "zeropp", None))

    trainer.forward_backward_step, trainer.train_step = recorded_micro_batch, recorded_step
