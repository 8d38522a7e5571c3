"""What an island that may leave says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.bounds import Bounds


@dataclass(frozen=True)
class Membership:
    """One island among those that come and go. Raises ValueError for values that cannot be."""

    island: int  # this one's number, from 0; the same when it returns
    num_islands: int  # which begin the run together
    lighthouse: str  # such as "host:29510"
    secret_file: str  # with the secret that all islands and the lighthouse share; only its owner may read it
    bind: str | None = (
        None  # address of this machine at which its ranks listen; None: the one that reaches the lighthouse
    )
    timeout: float = 60.0  # seconds, for what one island sends another; an agreement that takes longer breaks off
    patience: float = 3600.0  # seconds to wait for others at an agreement: longer than they train between two

    def __post_init__(self) -> None:
        for name, bounds in (
            ("num_islands", Bounds(at_least=1)),
            ("island", Bounds(at_least=0, below=self.num_islands)),
            ("timeout", Bounds(above=0)),
            ("patience", Bounds(above=0)),
        ):
            try:
                bounds.check(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name} {error}, got {getattr(self, name)}") from None
