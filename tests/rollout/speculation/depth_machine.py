"""Machines that a chooser of depth is tried on: what a step takes, what it gives, and what catching up costs."""

from collections.abc import Callable, Sequence

import numpy as np

from m2forge.rollout.speculation.adaptive_depth import MeasuredDepth, Moment

Seconds = Callable[[int], float]


def run(chooser: MeasuredDepth, num_steps: int, num_sequences: int, seconds: Seconds, accepted: float) -> list[int]:
    """Steps of a machine that needs `seconds` at a depth, over text of which a draft is right with `accepted`; what is
    verified is what the step before has drafted."""
    depths, before, random = [], 0, np.random.default_rng(0)
    for _ in range(num_steps):
        depth = chooser.choose(Moment(num_sequences))
        num_accepted = 0
        while num_accepted < before and random.random() < accepted:
            num_accepted += 1
        if before:
            places = range(chooser.max_depth)
            chooser.note_drafts(
                [int(place < before) for place in places], [int(place < num_accepted) for place in places]
            )
        if before == depth:
            chooser.note_steps(depth, num_sequences, 1, seconds(depth))
        depths.append(depth)
        before = depth
    return depths


def rate(depth: int, seconds: Seconds, accepted: float) -> float:
    return sum(accepted**place for place in range(depth + 1)) / seconds(depth)


def run_dear(
    chooser: MeasuredDepth, times: Sequence[float], price: float, shares: Sequence[float], free_every: int = 0
) -> tuple[float, int]:
    """(tokens a second of other steps, how often modules caught up) where that takes `price`; a draft is right with a
    share that changes every 400 steps. With `free_every`, one step in so many catches up at none."""
    random, now, num_tokens, total_s, num_dear = np.random.default_rng(0), 0, 0, 0.0, 0
    for step in range(400 * len(shares)):
        is_free = bool(free_every) and step % free_every == 0
        depth = chooser.choose(Moment(4, is_separate_step=not is_free))
        if depth > now and not is_free:
            chooser.note_mtp_prefill_step(4, price)
            num_dear += 1
        else:
            num_right = 0
            while num_right < depth and random.random() < shares[step // 400]:
                num_right += 1
            chooser.note_drafts([1] * depth, [int(place < num_right) for place in range(depth)])
            chooser.note_steps(depth, 4, 1, times[depth])
            num_tokens += num_right
            total_s += times[depth]
        num_tokens += 1
        now = depth
    return num_tokens / total_s, num_dear


TIMES = (1.0, 1.6, 1.9, 2.25)
ACCEPTED = 0.95
APART_S = 11.0


def serve_batches(num_batches: int, module_s: float, num_parts: int = 4) -> list[tuple[float, float]]:
    """(Speed over that of steps without drafts; seconds, over those without drafts) of batches that are read, in some
    parts, and sample 128 tokens each, from the first to the last, eight steps in a row. A module reads the prompts in
    four times `module_s`, and whatever it has not read when it is to draft: in a step apart."""
    chooser, num_sequences, num_prompt, found = MeasuredDepth(3), 256, 64, []
    for _ in range(num_batches):
        read_s, steps_s, num_computed, num_tokens = 4 * 14.0, 0.0, 0.0, 0.0
        num_seen = [0.0] * 3
        while num_tokens < 128:
            is_prefilling = num_computed < num_prompt
            mtp_lag = [round(num_sequences * (num_computed - seen)) for seen in num_seen]
            num_after_prefill = num_sequences if is_prefilling else 0
            depth = chooser.choose(
                Moment(num_sequences, num_after_prefill, not is_prefilling, mtp_lag, 128 - num_tokens)
            )
            num_missed = num_computed - num_seen[depth - 1] if depth else 0.0
            if is_prefilling:
                num_computed += num_prompt // num_parts
                num_missed += num_prompt // num_parts
                duration_s = 0.0
            elif num_missed:
                duration_s = APART_S
                num_computed += 1
                num_tokens += 1
            else:
                duration_s = 8 * TIMES[depth]
                chooser.note_steps(depth, num_sequences, 8, duration_s)
                num_new = 8 * sum(ACCEPTED**place for place in range(depth + 1))
                num_computed += num_new
                num_tokens += num_new
                nums = [round(1e4 * ACCEPTED**place) for place in range(depth + 1)]
                chooser.note_drafts([10_000] * depth, nums[1:])
            if depth and num_missed:
                module_total_s = depth * module_s * num_missed * 4 / num_prompt
                if is_prefilling:
                    chooser.note_mtp_prefill(depth, num_sequences, round(num_sequences * num_missed), module_total_s)
                    read_s += module_total_s
                else:
                    duration_s += module_total_s
                    chooser.note_mtp_prefill_step(num_sequences, duration_s)
            num_seen[:depth] = [num_computed] * depth
            steps_s += duration_s
        for _ in range(num_sequences):
            chooser.note_end(num_prompt, 128)
        found.append((num_tokens / steps_s, (read_s + 128 * steps_s / num_tokens) / (4 * 14.0 + 128)))
    return found
