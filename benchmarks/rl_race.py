"""A step of GRPO on every rank, in turns with each way to have weights for its rollouts; ``rl.py race`` starts it.

Rank 0 prints a JSON line per step: seconds, and the bytes that a node sent through its interface. Before, a line says
what two generations after an optimizer step sent, and whether their tokens equal an unsharded model's.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import new_parser
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig, apply_zeropp

ROLLOUTS, NEW_TOKENS, EPOCHS = 4, 24, 2
ZEROPP = ZeroPPConfig(
    quantized_weights=True, hpz_partition_size=2, hpz_secondary_dtype="int8", quantized_gradients=True
)
SETTINGS = {
    "FSDP2, gathers per token": None,
    "FSDP2, gathers once per generation": None,
    "hpZ": ZEROPP,
    "resident weights": ZEROPP,
}


class Policy:
    """The same tiny Llama under each setting, with its optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.shape = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.model = LlamaForCausalLM(self.shape)
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        self.units: list[FSDPModule] = [
            fully_shard(unit, mp_policy=bf16, reshard_after_forward=True)
            for unit in (*self.model.model.layers, self.model)
        ]
        config = SETTINGS[name]
        self.zeropp: ZeroPP | None = None if config is None else apply_zeropp(self.model, config)
        self.gathers_once = name == "FSDP2, gathers once per generation"
        self.is_resident = name == "resident weights"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def resident(self) -> AbstractContextManager[None]:
        return self.zeropp.resident_weights() if self.zeropp is not None and self.is_resident else nullcontext()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What FSDP1's ``summon_full_params`` did: units stay gathered after their first forward pass."""
        for unit in self.units if self.gathers_once else ():
            unit.set_reshard_after_forward(False, recurse=False)
        yield
        for unit in self.units if self.gathers_once else ():
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()

    def step(self, seed: int) -> float:
        """Roll out, and train on that for ``EPOCHS`` optimizer steps; return the mean reward."""
        with self.whole():
            tokens = generate(self.model, seed)  # [ROLLOUTS, 1 + NEW_TOKENS]
        written = tokens[:, 1:]
        rewards = (written < 64).float().mean(1)  # the share of wanted tokens, [ROLLOUTS]
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).unsqueeze(1)
        before: Tensor | None = None
        for _ in range(EPOCHS):
            logits = self.model(tokens[:, :-1]).logits.float()
            chosen = logits.log_softmax(-1).gather(-1, written.unsqueeze(-1)).squeeze(-1)  # [ROLLOUTS, NEW_TOKENS]
            before = chosen.detach() if before is None else before
            ratio = (chosen - before).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return rewards.mean().item()


def generate(model: nn.Module, seed: int) -> Tensor:
    """Sample ``ROLLOUTS`` texts of ``NEW_TOKENS`` from a prompt of this rank's own."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    prompt = torch.full((ROLLOUTS, 1), 1 + dist.get_rank())
    with torch.no_grad():
        options: dict[str, Any] = dict(do_sample=True, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]


def unsharded(policy: Policy) -> nn.Module:
    """A plain model of the weights that the sharded one computes with: bf16, rounded by what was sent."""
    weights: dict[str, Tensor] = {}

    def keep(prefix: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            own = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor)}
            weights.update({prefix + name: parameter.detach().clone() for name, parameter in own.items()})

        return hook

    names = {id(module): name for name, module in policy.model.named_modules()}
    prefixes = [f"{names[id(unit)]}." if names[id(unit)] else "" for unit in policy.units]
    # Registered after FSDP2's own, which have gathered by then.
    handles = [unit.register_forward_pre_hook(keep(p)) for unit, p in zip(policy.units, prefixes, strict=True)]  # type: ignore[attr-defined]
    with torch.no_grad():
        policy.model(torch.ones(1, 1, dtype=torch.int64))
    for handle in handles:
        handle.remove()
    plain = LlamaForCausalLM(policy.shape)
    for parameter in plain.parameters():  # and no buffers, as under FSDP2
        parameter.data = parameter.to(torch.bfloat16)
    plain.load_state_dict(weights)
    return plain


def check(policy: Policy) -> dict[str, Any]:
    """Bytes of all ranks in two generations after an optimizer step; whether their tokens are an unsharded model's."""
    assert policy.zeropp is not None
    policy.step(seed=1)
    policy.zeropp.traffic.take()
    sent, texts = [], []
    for _ in range(2):
        texts.append(generate(policy.model, seed=2))
        taken = policy.zeropp.traffic.take()
        total = torch.tensor([taken.inter_node, taken.intra_node])
        dist.all_reduce(total)
        sent.append(total.tolist())
    texts.append(generate(unsharded(policy), seed=2))
    are_equal = torch.tensor([torch.equal(texts[0], text) for text in texts[1:]]).all().int()
    dist.all_reduce(are_equal, op=dist.ReduceOp.MIN)
    return {"first_generation": sent[0], "second_generation": sent[1], "tokens_equal_unsharded": bool(are_equal)}


def sent_bytes() -> int:
    """Bytes that left this node's interface in the cluster in a box."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    policies = {name: Policy(name) for name in SETTINGS}
    policy = policies["resident weights"]
    with policy.resident():
        checked = check(policy)
    numbers = sum(parameter.numel() for parameter in policy.model.parameters())
    if dist.get_rank() == 0:
        print(json.dumps({"parameters": numbers, **checked}), flush=True)
    for turn in range(arguments.rounds + 1):  # the first one warms up
        for name in SETTINGS if turn % 2 else reversed(SETTINGS):
            policy = policies[name]
            with policy.resident():
                policy.step(seed=100 + 2 * turn)  # leaves behind what a step finds
                dist.barrier()
                before, start = sent_bytes(), time.perf_counter()
                reward = policy.step(seed=101 + 2 * turn)
                dist.barrier()
                seconds, sent = time.perf_counter() - start, sent_bytes() - before
            if dist.get_rank() == 0 and turn > 0:
                row = {"setting": name, "round": turn, "seconds": seconds, "bytes_of_a_node": sent, "reward": reward}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
