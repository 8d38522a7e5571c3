"""The parameters of a model that islands synchronize together, and the two hops that average them."""

import re
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.fsdp.collectives import all_gather

from .config import IslandConfig
from .hops import IslandHops
from .outer_state import MAX_VALUE, OuterState, are_sound, local_data


class Fragment:
    """A fragment of this rank's parameters, exchanged with the ranks of the same place in the other islands."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: IslandConfig,
        group: dist.ProcessGroup,
        traffic: Traffic,
        all_parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """all_parameters: of this rank, in all fragments; an island contributes where all of them are sound."""
        self.parameters, self.outer = parameters, OuterState(parameters, config)
        self._group, self._all_parameters = group, all_parameters
        # Ranks exchange tensors on this device; parameters may be offloaded. The group's one backend does not say it: a
        # group that init_process_group() made without a name has one for each kind of device.
        takes_gpu = "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if takes_gpu else torch.device("cpu")
        self._merge_alpha = config.merge_alpha
        parts = {name: local_data(parameter) for name, parameter in parameters.items()}
        self.hops = IslandHops(parts, group.size(), config, traffic, self._device)

    def start(self, step: int, is_left_out: bool = False) -> bool:
        """Send the first hop: what islands trained since the last outer step.

        Return False if this island holds NaN, Inf or numbers beyond ``MAX_VALUE``, and so contributes nothing, as one
        that ``is_left_out`` does. step: for the note about it.
        """
        differences = self.outer.differences(self.parameters)
        present = self._sound_islands(differences, is_left_out)
        is_present = present[self._group.rank()]
        if dist.get_rank() == 0 and not all(present):
            left_out = ", ".join(str(island) for island, is_sound in enumerate(present) if not is_sound)
            where = f"{MAX_VALUE:g} is in the parameters of island {left_out} after step {step}"
            those = f"{sum(present)} of {len(present)} islands synchronize, and what is left out goes on from there"
            print(f"note: NaN, Inf or a number beyond {where}: {those}", flush=True)
        sent = self.hops.encode_pieces(differences, max(1, sum(present)), is_present)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        self.hops.launch(received, (work, sent))
        return is_present

    def _sound_islands(self, differences: Sequence[Tensor] = (), is_left_out: bool = False) -> list[bool]:
        """Return for each island whether all its ranks are sound and not left out. Collective over all ranks."""
        local = [local_data(parameter) for parameter in self._all_parameters.values()]
        unsound = torch.zeros(self._group.size(), device=self._device)
        unsound[self._group.rank()] = is_left_out or not (are_sound(local) and are_sound(differences))
        dist.all_reduce(unsound)
        return [count == 0 for count in unsound.tolist()]

    def start_second_hop(self) -> None:
        """Wait for the first hop, and send each rank's piece of the mean."""
        received = self.hops.take()
        sent, mean = self.hops.encode_mean(received), torch.empty_like(received)
        work = all_gather(mean.view(-1), sent, group=self._group, async_op=True)
        self.hops.launch(mean, (work, sent))

    def finish(self, on_mean: bool = False) -> None:
        """Wait for the second hop, and take the outer step; ``on_mean``: without the outer optimizer."""
        self.outer.step(self.hops.decode_mean(self.hops.take()), on_mean)
        self.outer.copy_to(self.parameters, self._merge_alpha)

    def restart(self) -> None:
        """Copy the first island's parameters to all, and to the outer state. Raises ValueError if they are unsound."""
        if not self._sound_islands()[0]:
            wrong = f"NaN, Inf or a number beyond {MAX_VALUE:g} is in the parameters of the first island"
            raise ValueError(f"{wrong}, with which all islands start: load other weights")
        for parameter in self.parameters.values():
            values = local_data(parameter).to(self._device).contiguous()
            dist.broadcast(values, group=self._group, group_src=0)
            local_data(parameter).copy_(values)
        self.outer.reset(self.parameters)


def split_into_fragments(parameters: Mapping[str, nn.Parameter], fragments: int) -> list[dict[str, nn.Parameter]]:
    """Return each fragment's parameters by name: every F-th layer; the first fragment has all that is in no layer.

    The first number in a name is its layer: "layers.5" of "layers.5.mlp.weight". Raises ValueError if a fragment would
    be empty.
    """
    layers: dict[str, int] = {}
    divided: list[dict[str, nn.Parameter]] = [{} for _ in range(fragments)]
    for name, parameter in parameters.items():
        layer = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
        number = layers.setdefault(layer[0], len(layers)) if layer is not None else 0
        divided[number % fragments][name] = parameter
    if not all(divided):
        raise ValueError(f"{fragments} fragments are more than the {len(layers)} layers of a rank: ask for fewer")
    return divided
