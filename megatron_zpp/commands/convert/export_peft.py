"""Write the adapters of a checkpoint as a folder of PEFT: adapter_config.json and adapter_model.safetensors.

``peft.PeftModel.from_pretrained(model, "runs/peft")`` adds them to the model of transformers that the base is. Needs
the extra ``hf``.
"""

import argparse
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError, iterate_parameters
from megatron_zpp.checkpoint.meta import saved_model
from megatron_zpp.commands.common import open_verified
from megatron_zpp.commands.convert.export_hf import converted, export_parser
from megatron_zpp.convert.hf import files
from megatron_zpp.errors import reports_errors
from megatron_zpp.settings.flags import local_path


def export(args: argparse.Namespace) -> str:
    """Write the folder; return a message for the user. Raises ValueError, OSError or ImportError on a mistake."""
    files.require_packages()
    from safetensors.torch import save_file

    checkpoint, meta = open_verified(args.load, args.ckpt_step)
    architecture, config = saved_model(meta, with_adapters=True)
    mapping, settings = architecture.huggingface_model(config), meta["settings"]
    if settings.get("lora_rank") is None:
        raise CheckpointError(f"{checkpoint} has no adapters: export-hf writes the whole model")
    if architecture.name == "gpt" or any(len(weight.ours) > 1 for weight in mapping.weights(config)):
        raise ValueError(f"adapters of {mapping.model_type} cannot be exported: layers are fused or transposed there")
    ours = {name: converted(x, name, checkpoint, args.dtype) for name, x in iterate_parameters(checkpoint, meta)}
    theirs: dict[str, Tensor] = {}
    for weight in mapping.weights(config):
        name = weight.ours[0].removesuffix(".weight")
        if f"{name}.lora_A" not in ours:
            continue
        # Queries, keys and values are one layer here: they share A, and each has its rows of B.
        for their_name, rows in zip(weight.theirs, weight.split(ours[f"{name}.lora_B"]), strict=True):
            module = f"base_model.model.{their_name.removesuffix('.weight')}"
            theirs |= {f"{module}.lora_A.weight": ours[f"{name}.lora_A"], f"{module}.lora_B.weight": rows}
    peft_config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": args.base,
        "r": settings["lora_rank"],
        "lora_alpha": settings["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in theirs}),
        "inference_mode": True,
    }
    with files.new_folder(args.output, "--output") as folder:
        files.write_json(folder / "adapter_config.json", peft_config)
        tensors = {name: tensor.contiguous().clone() for name, tensor in theirs.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return f"{args.output}: adapters of {len(theirs) // 2} layers of {checkpoint}"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = export_parser("Write the adapters of a checkpoint as a folder of PEFT.")
    base = "the Hugging Face model that the folder names as its base"
    parser.add_argument("--base", type=local_path(str), metavar="DIR", help=base)
    return parser.parse_args(argv)


@reports_errors
def main() -> None:
    print(export(parse_arguments()))
