"""Schedules over a phase: learning rate and loss weights, as functions of the step alone.

x = step / (steps − 1)                          0 at the first step of the phase, 1 at its last
linear: start + (end − start) · x               cosine: end + (start − end) · (1 + cos πx) / 2
warmup multiplies by (step + 1) / warmup_steps until that reaches 1
"""

import math

from m2forge.train.config import Curve, PhaseConfig


def curve_at(curve: Curve, step: int, num_steps: int) -> float:
    """The value of a curve over `num_steps` at `step`, counted from 0."""
    if curve.end is None:
        return curve.start
    done = step / max(1, num_steps - 1)
    if curve.shape == "cosine":
        return curve.end + (curve.start - curve.end) * (1 + math.cos(math.pi * done)) / 2
    return curve.start + (curve.end - curve.start) * done


def rate_at(phase: PhaseConfig, step: int) -> float:
    rate = curve_at(phase.rate, step, phase.steps)
    return rate * min(1.0, (step + 1) / phase.warmup_steps) if phase.warmup_steps else rate


def mtp_weight_at(phase: PhaseConfig, step: int) -> float:
    return curve_at(phase.mtp_weight, step, phase.steps)
