"""Say once if a run is not as ``--zeropp auto`` predicted it."""

from typing import Any

STEPS = 200  # that are averaged before anything is said
FACTOR = 1.5  # far beyond the planner's errors: docs/evidence/planner.md


class Advice:
    """Compares steps with the prediction (a ``StepTime``) behind the recipe. Changes nothing."""

    def __init__(self, predicted: Any) -> None:
        self._predicted = predicted
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0

    def after(self, steps: int, seconds: float, waited_between: float) -> str | None:
        """Count the steps of a log line, whose means are given; return what to say, once.

        waited_between: seconds that a rank waited for links between nodes in a step.
        """
        if self._predicted is None:
            return None
        self._steps += steps
        self._seconds += steps * seconds
        self._waited += steps * waited_between
        if self._steps < STEPS:
            return None
        predicted, step, waited = self._predicted, self._seconds / self._steps, self._waited / self._steps
        self._predicted = None
        if predicted.seconds / FACTOR < step < predicted.seconds * FACTOR:
            return None
        return (
            f"advice: a step takes {step:.3g} s and waits {waited:.3g} s for links between nodes, where --zeropp auto "
            f"predicted {predicted.seconds:.3g} and {predicted.exposed_between:.3g}: links or machines have changed. "
            "Ask megatron-zpp plan, and resume with a --zeropp by name"
        )
