"""What is rewarded, and how rewards become advantages and weights.

    [reward]
    alpha = 0.1
    beta = 0.1

    [reward.rules]
    malformed_call = -1.0

The weights, thresholds and shapes that are defaults here are ours: none has been published.
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
    """When writing in several scripts counts as mixing languages. Letters are counted as `reward/script.py` says."""

    home: Literal["conversation", "completion"] = "conversation"
    """Whose script is the right one: the user's, or whichever each text is mostly written in. The second lets a model
    answer in another language than it was asked in, as translators do."""
    home_letters: Count = 24
    """A script in which the user wrote so many letters belongs to the conversation, beside the dominant one."""
    min_letters: Count = 12
    """Fewer foreign letters than this are a name or a term, and no mixing."""
    min_latin_words: Count = 4
    """In a conversation of another script, Latin counts only where so many words of it follow one another: terms and
    names are written in Latin letters the world over."""
    allowed_share: Share = 0.02
    """Foreign letters up to this share of all are no mixing."""
    full_share: Share = 0.2
    """From this share on the whole penalty is due; between the two it grows linearly."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.full_share <= self.allowed_share:
            raise ValueError(f"full_share ({self.full_share}) must exceed allowed_share ({self.allowed_share})")
        return self


class RulesConfig(Config):
    """The weight of each process rule; 0 leaves it out. `reward/rule.py` says what each looks at."""

    malformed_call: Penalty = -1.0
    bad_argument: Penalty = -0.5
    unknown_tool: Penalty = -1.0
    language_mixing: Penalty = -0.5
    structured_step: Premium = 0.2
    mixing: MixingConfig = MixingConfig()


class SpeedConfig(Config):
    shape: SpeedShape = "reciprocal"
    """Of h; `reward/speed.py` states the formulas."""
    half_ratio: float = Field(default=1.0, gt=0)
    """The time, in baseline times, for which half is paid; with shape "step", up to which everything is."""
    window: Count = 16
    """The baseline time of a task is the median of so many of its latest passing attempts."""
    min_base_s: float = Field(default=0.1, gt=0)
    """No baseline time is shorter: the clock says nothing about shorter ones."""


class AdvantageConfig(Config):
    gamma: Share = 1.0
    """Discount per step."""
    baseline: Baseline = "leave_one_out"
    normalisation: Normalisation = "none"
    """group_std divides by the spread of the returns within the group, batch_std by that over all of the batch."""
    min_std: float = Field(default=0.1, gt=0)
    """Nothing is divided by less: where all returns are nearly alike, dividing would make noise as loud as success."""
    single: Literal["zero_advantage", "zero_baseline"] = "zero_advantage"
    """What an episode without others to compare with teaches: nothing, or its reward as it is."""
    weighting: Weighting = "token_mean"


class RewardConfig(Config):
    """r_t = α·process_t + β·speed_t + perf_t at every step t of an episode."""

    alpha: float = Field(default=0.1, ge=0)
    beta: float = Field(default=0.1, ge=0)
    pass_perf: float = 1.0
    """The task is solved where the verifier's value reaches this; only then speed is paid."""
    credit: Literal["shared", "full"] = "shared"
    """What a rule with a positive weight pays: the weight divided by the number of steps, or at every step the whole of
    it, which also rewards taking more steps. A penalty is never divided."""
    shuffled: bool = False
    """For control runs: the rewards of a group's attempts are dealt to them at random, so that a policy that still gets
    better does so for another reason. The evidence stays with its attempt."""
    rules: RulesConfig = RulesConfig()
    speed: SpeedConfig = SpeedConfig()
    advantage: AdvantageConfig = AdvantageConfig()
