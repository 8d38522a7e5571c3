"""Compare our logits with transformers', reading weights when they are needed so that no model is whole in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_zpp.models.transformer import Transformer

TOLERANCE = 1e-4  # for fp32 logits, relative to the largest if that is above 1


def compare(
    model: Transformer,
    ours: Callable[[str], Tensor],
    hf_config: dict[str, Any],
    theirs: Callable[[str], Tensor],
    positions: int,
) -> float:
    """Return the largest difference between our logits and transformers', in fp32 on random tokens.

    model: ours, on the meta device. ours, theirs: read its parameters by name. Raises ValueError for more than
    rounding.
    """
    tokens = torch.randint(model.config.vocab_size, (2, min(64, positions)), generator=torch.Generator().manual_seed(0))
    a = streamed_logits(model.eval(), ours, tokens)
    b = streamed_logits(transformers_model(hf_config), theirs, tokens)
    difference, allowed = float((a - b).abs().max()), TOLERANCE * max(1.0, float(b.abs().max()))
    if not difference <= allowed:
        wrong = f"transformers' logits differ from ours by up to {difference:.1e}, where {allowed:.1e} is allowed"
        raise ValueError(f"{wrong}, so the result was not kept: please report this as a bug")
    return difference


def transformers_model(config: dict[str, Any]) -> nn.Module:
    """Build transformers' model of a config.json, on the meta device and in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model(**config)
    hf_config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config).float().eval()
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None:  # its frequencies are not weights, so nothing would fill them in
        model.base_model.rotary_emb = type(rotary)(hf_config)
    for module in model.modules():  # nor are Gemma's factors of embeddings
        if "embed_scale" in module._buffers:
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model


@torch.no_grad()
def streamed_logits(model: nn.Module, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """Compute fp32 logits [B, S, V] of a model on the meta device, with one block's weights in memory at a time."""
    prefix, blocks = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for index, block in enumerate(blocks):
        _fill_while_running(block, f"{prefix}.{index}.", read)
    others = [name for name, _ in model.named_parameters() if not name.startswith(f"{prefix}.")]
    output = functional_call(model, {name: read(name).float() for name in others}, (tokens,))
    return output if isinstance(output, Tensor) else output.logits


def _fill_while_running(block: nn.Module, prefix: str, read: Callable[[str], Tensor]) -> None:
    empty = dict(block.state_dict())

    def fill(module: nn.Module, inputs: Any) -> None:
        module.load_state_dict({name: read(prefix + name).float() for name in empty}, assign=True)

    def drop(module: nn.Module, inputs: Any, output: Any) -> None:
        module.load_state_dict(empty, assign=True)

    block.register_forward_pre_hook(fill)
    block.register_forward_hook(drop)
