"""Loss scaling of fp16 training: a factor on the loss that keeps small gradients representable."""

from __future__ import annotations

from megatron_zpp.settings.groups import PrecisionSettings


class LossScaler:
    """A fixed or dynamic loss scale, by Megatron's rules.

    The dynamic scale doubles after ``window`` clean steps in a row. Each overflow uses up one of ``hysteresis``
    tolerated ones; when they are used up, this and every further overflow halves the scale, down to ``min_scale``.
    Tolerance comes back only when the scale grows.
    """

    def __init__(
        self,
        scale: float,
        *,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
    ) -> None:
        if scale <= 0 or min_scale <= 0:
            raise ValueError(f"loss scales must be positive: scale {scale}, --min-loss-scale {min_scale}")
        if dynamic and scale < min_scale:
            raise ValueError(f"--initial-loss-scale {scale} is below --min-loss-scale {min_scale}: raise it")
        if dynamic and (window < 1 or hysteresis < 1):
            raise ValueError(f"--loss-scale-window {window} and --hysteresis {hysteresis} must be at least 1")
        self.scale = float(scale)
        self._dynamic = dynamic
        self._window = window
        self._hysteresis = hysteresis
        self._min_scale = min_scale
        self._clean_steps = 0
        self._tolerance = hysteresis

    @classmethod
    def from_settings(cls, precision: PrecisionSettings) -> LossScaler:
        """Dynamic for ``--fp16``, fixed with ``--loss-scale`` too; 1.0 for bf16 and fp32, which need none."""
        if not precision.fp16:
            return cls(1.0)
        if precision.loss_scale is not None:
            return cls(precision.loss_scale)
        return cls(
            precision.initial_loss_scale,
            dynamic=True,
            window=precision.loss_scale_window,
            hysteresis=precision.hysteresis,
            min_scale=precision.min_loss_scale,
        )

    def update(self, overflow: bool) -> None:
        """Call once per step; ``overflow``: a gradient was Inf or NaN, on any rank (all ranks must agree)."""
        if not self._dynamic:
            return
        if overflow:
            self._clean_steps = 0
            self._tolerance -= 1
            if self._tolerance <= 0:
                self.scale = max(self.scale / 2, self._min_scale)
            return
        self._clean_steps += 1
        if self._clean_steps == self._window:
            self._clean_steps = 0
            self._tolerance = self._hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep so that a resumed run scales the same."""
        return dict(scale=self.scale, clean_steps=self._clean_steps, tolerance=self._tolerance)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from ``state_dict``. A fixed scale stays what the settings say."""
        if not self._dynamic:
            return
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._tolerance = int(state["tolerance"])
