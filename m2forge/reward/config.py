"""Configuration of rewards, and of how they become advantages and loss weights.

    [reward]
    alpha = 0.1
    beta = 0.1

    [reward.rules]
    malformed_call = -1.0

The default weights, thresholds and shapes are ours: none has been published.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(le=0)]
Premium = Annotated[float, Field(ge=0)]

SpeedShape = Literal["linear", "exponential", "reciprocal", "step"]
Baseline = Literal["leave_one_out", "group_mean", "trajectory_mean"]
Normalisation = Literal["none", "group_std", "batch_std"]
Weighting = Literal["token_mean", "episode_mean"]


class MixingConfig(Config):
    """When writing in several scripts counts as mixing languages. `reward/rule.py` specifies how letters count."""

    home: Literal["conversation", "completion"] = "conversation"
    """The expected script: that of the user (conversation), or the dominant one of each text (completion). The second
    lets a model answer in another language than that of the prompt, as for translations."""
    home_letters: Count = 24
    """A script in which the user wrote at least this many letters belongs to the conversation, beside the dominant one.
    """
    min_letters: Count = 12
    """Fewer foreign letters than this count as a name or a term, not as mixing."""
    min_latin_words: Count = 4
    """In a conversation of another script, Latin counts only in runs of at least this many words, because terms and
    names are written in Latin letters everywhere."""
    allowed_share: Share = 0.02
    """Foreign letters up to this share of all letters do not count as mixing."""
    full_share: Share = 0.2
    """From this share on the full penalty applies; between the two it grows linearly."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.full_share <= self.allowed_share:
            raise ValueError(f"full_share ({self.full_share}) must exceed allowed_share ({self.allowed_share})")
        return self


class RulesConfig(Config):
    """The weight of each process rule; 0 disables it. `reward/rule.py` specifies what each measures."""

    malformed_call: Penalty = -1.0
    bad_argument: Penalty = -0.5
    unknown_tool: Penalty = -1.0
    language_mixing: Penalty = -0.5
    structured_step: Premium = 0.2
    mixing: MixingConfig = MixingConfig()


class SpeedConfig(Config):
    shape: SpeedShape = "reciprocal"
    """Shape of the speed reward h; `reward/judge.py` states the formulas."""
    half_ratio: float = Field(default=1.0, gt=0)
    """Time, in baseline times, at which the speed reward is 1/2; with shape "step", up to which it is 1."""
    window: Count = 16
    """Number of latest passing attempts whose median time is the baseline time of a task."""
    min_base_s: float = Field(default=0.1, gt=0)
    """Minimum baseline time, because shorter times are below what the clock can compare."""


class AdvantageConfig(Config):
    gamma: Share = 1.0
    """Discount per step."""
    baseline: Baseline = "leave_one_out"
    normalisation: Normalisation = "none"
    """Divisor of the advantages: group_std is the standard deviation of the returns within the group, batch_std that
    over the batch."""
    min_std: float = Field(default=0.1, gt=0)
    """Minimum divisor: where all returns are nearly equal, dividing by less would amplify noise."""
    single: Literal["zero_advantage", "zero_baseline"] = "zero_advantage"
    """How to treat an episode without others to compare with: advantage 0, or baseline 0."""
    weighting: Weighting = "token_mean"
    side_calls: bool = False
    """Whether side calls are trained: single requests without tools beside a conversation that has them, such as titles
    and commit messages. They are recorded either way."""
    sub_agents: bool = True
    """Whether conversations beside the main one are trained."""


class RewardConfig(Config):
    """r_t = α·process_t + β·speed_t + perf_t at every step t of an episode.

    `function` adds its own reward, or replaces these. It is called as `f(task, submission, verdict)` in the worker
    processes that run verifiers, and returns the reward of the episode, paid at its last step, or a list with that of
    each step. An attempt that failed is not verified, and its function's reward is 0."""

    function: str | None = None
    """FILE.py:NAME, relative to the working directory, or PACKAGE.MODULE:NAME; None: no such function."""
    mode: Literal["replace", "add"] = "add"
    """Whether the function's reward replaces r_t or is added to it."""

    alpha: float = Field(default=0.1, ge=0)
    beta: float = Field(default=0.1, ge=0)
    pass_perf: float = 1.0
    """Minimum perf at which a task counts as solved; only then is speed rewarded."""
    credit: Literal["shared", "full"] = "shared"
    """What a rule with a positive weight pays per step: the weight divided by the number of steps (shared), or the full
    weight, which also rewards taking more steps. A penalty is never divided."""
    shuffled: bool = False
    """For control runs: rewards are permuted at random within each group, so that a policy that still improves does so
    for another reason. The evidence stays with its attempt."""
    rules: RulesConfig = RulesConfig()
    speed: SpeedConfig = SpeedConfig()
    advantage: AdvantageConfig = AdvantageConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.function is None and "mode" in self.model_fields_set and self.mode == "replace":
            raise ValueError('mode = "replace" needs a function; set reward.function = "FILE.py:NAME"')
        return self
