"""DAC: when to compress and at which ranks, from numbers that are the same on every worker."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_edgc import trial
from hf_edgc.allocation import capped, elements, mean_rank
from hf_edgc.budget import Budget, Costs
from hf_edgc.config import EDGCConfig
from hf_edgc.error_rule import error_is_bearable
from hf_edgc.layout import Matrix
from hf_edgc.measured import Measured
from hf_edgc.progress import Progress
from hf_edgc.ranks import RankDecision
from hf_edgc.watchdog import alarm


@dataclass(frozen=True)
class Plan:
    """What one step does: the rank of each matrix of the layout (0: dense), and their mean.

    ``rank`` is the mean over the compressed matrices, weighted by the bytes that a rank of each costs.
    """

    rank: float
    ranks: tuple[int, ...]

    @property
    def compress(self) -> bool:
        """Whether any matrix is compressed."""
        return any(self.ranks)


class Controller:
    """Warm-up, windows and watchdog of one model (arXiv 2511.10333, DAC, one stage); ``RankDecision`` has the ranks.

    ``advance`` is called once after each optimizer step with numbers already averaged over the workers;
    the plan changes there and nowhere else, so every worker holds the same plan for the next step.
    """

    def __init__(
        self,
        config: EDGCConfig,
        matrices: Sequence[Matrix],
        total_steps: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Start a run of ``total_steps`` optimizer steps (None: unknown, then there is no byte budget yet).

        ``costs`` are those of a step; None: of a model in float32 that has nothing else than ``matrices``.

        Raises:
            ValueError: the target compression ratio can't be met.
        """
        self._config = config
        self._matrices = tuple(matrices)
        self._total_steps = total_steps
        self._costs = costs if costs is not None else Costs.of(matrices)
        self._window_steps = config.window(total_steps)
        self._warmup_floor, self._warmup_ceiling = config.warmup_steps(total_steps)
        budget = None
        if config.target_compression_ratio is not None and total_steps is not None:
            budget = Budget.for_run(config, self._matrices, self._costs, total_steps)
        self._decision = RankDecision(config, self._matrices, self._window_steps, budget)
        self._progress = Progress(compressing=config.mode != "none" and self._warmup_ceiling == 0)
        self._decision.start(self._progress)

    @property
    def step(self) -> int:
        """Optimizer step that the plan is for, from 0."""
        return self._progress.step

    @property
    def rank(self) -> int:
        """Rank of all matrices that has the bytes of the current or, in the warm-up, the first compressed step."""
        return self._progress.rank

    @property
    def target_rank(self) -> float | None:
        """What was asked for at the end of the last window, before step limit, clamps and allocation."""
        return self._progress.target_rank

    @property
    def phase(self) -> str:
        """``off``, ``warmup``, ``compress``, or ``fallback`` where the watchdog has given compression up."""
        if self._config.mode == "none" or not self._matrices:
            return "off"
        if self._progress.fallback_steps > 0:
            return "fallback"
        return "compress" if self._progress.compressing else "warmup"

    @property
    def plan(self) -> Plan:
        """Ranks for the current step."""
        if self.phase != "compress":
            return Plan(0.0, (0,) * len(self._matrices))
        ranks = trial.masked(self._config, self._progress)
        return Plan(mean_rank(self._matrices, ranks), ranks)

    @property
    def trial_stage(self) -> trial.Stage:
        """Where ``codec=auto`` is: ``dense`` or ``compressed`` in a trial, ``over`` before its result, else ``off``."""
        return trial.stage(self._config, self._progress) if self.phase == "compress" else "off"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks as if all matrices were compressed in the current step."""
        return tuple(self._progress.ranks)

    def begin_trial(self) -> None:
        """Start a trial with the current step."""
        self._progress.trial_step = self.step

    def end_trial(self, paying: Sequence[bool], found_max_rank: int | None) -> None:
        """Compress the ``paying`` matrices only, at ranks up to ``found_max_rank``, until the next trial."""
        progress = self._progress
        progress.paying, progress.found_max_rank = list(paying), found_max_rank
        if found_max_rank is not None and progress.rank > found_max_rank:
            progress.rank = found_max_rank
            progress.ranks = capped(self._matrices, found_max_rank)
            progress.ranks_since = progress.step
        progress.trial_step = self.step + max(trial.WINDOWS_BETWEEN * self._window_steps, trial.STEPS_BETWEEN)

    @property
    def wants_entropies(self) -> bool:
        """Whether this step's gradients are to be measured (GDS, iteration sampling)."""
        if self._config.mode != "edgc" or self.phase == "off" or self.step % self._config.entropy_every != 0:
            return False
        return self.phase != "compress" or self.plan.compress  # else codec auto has found that nothing pays

    @property
    def predicted_error_norm(self) -> float | None:
        """What the model of the last decision says of the errors' norm before the current step; None without one."""
        if self.phase != "compress":
            return None
        return self._decision.predicted_error_norm(self._progress)

    def advance(self, measured: Measured | None = None, sent_bytes: int | None = None) -> str:
        """End the step.

        Args:
            measured: of the step just done, averaged over the workers; None if it was not measured.
            sent_bytes: bytes that one worker has sent in it, the same on all workers; None: as ``costs`` say.

        Returns:
            Why compression is given up for a window, with all errors to be dropped; empty if it is not.
        """
        progress = self._progress
        progress.sent_bytes += self._expected_bytes() if sent_bytes is None else sent_bytes
        if measured is not None:
            progress.note(measured, len(self._matrices))
        progress.step += 1
        if self.phase == "warmup":
            self._maybe_end_warmup()
        elif self.phase == "fallback":
            progress.fallback_steps -= 1
            if progress.fallback_steps == 0:
                progress.begin_window(errors_are_zero=True)
        elif self.phase == "compress" and self._config.mode == "edgc":
            if measured is not None and measured.grad_norm > 0:
                progress.smallest_grad_norm = min(progress.smallest_grad_norm, measured.grad_norm)
            why = alarm(self._config, measured, progress.smallest_grad_norm, self._window_steps) if measured else ""
            if why:
                progress.fallback_steps = self._window_steps
                return why
            progress.window_position += 1
            self._decision.after_step(progress)
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain numbers, strings and lists."""
        return {"matrices": [matrix.name for matrix in self._matrices], **asdict(self._progress)}

    def load_state_dict(self, state: dict[str, Any], same_config: bool = True) -> None:
        """Go on from ``state_dict()`` of a controller of a like model.

        Matrices are known by their names: those that are new have no history, those that are gone are dropped.
        With another config the step, the phase, the bytes sent and the learning rate are kept, and the ranks start as
        the config says.

        Raises:
            ValueError: the state lacks fields or has unknown ones.
        """
        try:
            fields = dict(state)
            names = fields.pop("matrices")
            progress = Progress(**fields)
            progress.rename(names, self._matrices)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"controller state does not fit this version: {error}") from error
        if not same_config:
            compressing = progress.compressing or self._warmup_ceiling == 0
            progress = progress.restarted(self._config.mode != "none" and compressing)
            self._decision.start(progress)
        self._progress = progress

    def _expected_bytes(self) -> float:
        """Bytes of the current step, by its plan."""
        if self.phase != "compress":
            return self._costs.dense_bytes
        return self._costs.compressed(elements(self._matrices, self._progress.ranks))

    def _maybe_end_warmup(self) -> None:
        progress, config = self._progress, self._config
        if progress.step < self._warmup_floor:
            return
        bearable = bool(progress.window) and error_is_bearable(
            config, self._matrices, progress.first_entropies or [], progress.window[-1]["entropies"]
        )
        if progress.step >= self._warmup_ceiling or config.mode == "static" or bearable:
            progress.compressing = True
            progress.begin_window(errors_are_zero=True)
            self._decision.start(progress)
