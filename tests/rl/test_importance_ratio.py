"""Ratios of trained to sampled probability: what a step found, kept for the last steps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.pool.pool import Pool
from m2forge.pool.stored import StoredEpisode
from m2forge.records import Call, FloatArray, PolicyVersion
from m2forge.rl.importance_ratio import delete_ratios, path_of, read_ratios, write_ratios
from m2forge.rl.layout import Layout
from m2forge.rl.trainer import Trainer
from tests.bounds import within
from tests.rl.scene import fill_pool, make_config, make_model


def fresh_logprobs(model: Transformer, call: Call) -> FloatArray:
    """Return the logprobs of the sampled tokens by a forward pass over the call alone."""
    path = torch.tensor(np.concatenate((call.prompt_ids, call.response_ids)), dtype=torch.int64)
    with torch.no_grad():
        logp = model.logits(model(path[None]).hidden_ND).log_softmax(-1)
    start = call.prompt_ids.size
    found: FloatArray = logp[torch.arange(start - 1, path.numel() - 1), path[start:]].numpy()
    return found


def test_ratios_are_1_on_policy_and_equal_a_fresh_forward_later(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "scene")
    # One batch for each step, and a rate that moves the policy far.
    config = make_config(folder, num_steps=2, lr={"start": 3e-2})
    sampled_by = load_model(folder)
    layout = Layout(tmp_path)
    with Pool(layout.pool(config.pool), sampled_by.config.vocab_size) as pool:
        fill_pool(pool, 4, 2, lambda call: fresh_logprobs(sampled_by, call))
        Trainer(tmp_path, config).run()
        pool.restore(PolicyVersion("run", 0))
        moved = load_model(next(layout.weights.glob("step-00000001-*")))
        for step, policy in ((1, sampled_by), (2, moved)):
            claimed = pool.claim(2, PolicyVersion("run", 0))
            assert claimed is not None
            episodes = [episode for unit in pool.fetch(claimed) for episode in unit.episodes]
            check_ratios(layout.ratios, step, policy, episodes, is_far=step == 2)


def check_ratios(folder: Path, step: int, policy: Transformer, episodes: list[StoredEpisode], *, is_far: bool) -> None:
    found = read_ratios(folder, step)
    assert found is not None
    calls = {
        f"{episode.name}/{index}": call for episode in episodes for index, call in enumerate(episode.episode().calls)
    }
    assert found.keys() == calls.keys()
    for name, call in calls.items():
        expected = np.exp(fresh_logprobs(policy, call) - call.logprobs)
        # Kept as float16 of the logarithm.
        np.testing.assert_allclose(np.exp(found[name]), expected, rtol=1e-4 if not is_far else 2e-3)
        if not is_far:
            np.testing.assert_allclose(np.exp(found[name]), 1.0, rtol=1e-4)
    assert (max(np.abs(values).max() for values in found.values()) > 0.1) == is_far


def test_the_last_steps_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        write_ratios(tmp_path, step, {"a/0": np.array([0.5, -1e6], np.float32), "a/1": np.empty(0, np.float32)}, keep=3)
    assert [step for step in range(9) if read_ratios(tmp_path, step) is not None] == [4, 5, 6]
    found = read_ratios(tmp_path, 6)
    assert found is not None
    assert {name: values.tolist() for name, values in found.items()} == {"a/0": [0.5, -60000.0], "a/1": []}
    delete_ratios(tmp_path, 4)
    assert [step for step in range(9) if read_ratios(tmp_path, step) is not None] == [4]
    write_ratios(tmp_path, 5, {}, keep=3)
    assert read_ratios(tmp_path, 5) == {}
    write_ratios(tmp_path, 6, {}, keep=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK no zip", b"\x93NUMPY"])
def test_a_broken_file_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-00000003.npz").write_bytes(content)
    assert read_ratios(tmp_path, 3) is None


def test_an_archive_that_states_or_packs_too_much_is_skipped(tmp_path: Path) -> None:
    write_ratios(tmp_path, 1, {"a/0": np.zeros(3, np.float32)}, keep=2)
    assert read_ratios(tmp_path, 1) is not None
    path = path_of(tmp_path, 1)
    with np.load(path) as columns:
        arrays = dict(columns)
    with within(megabytes=16):
        np.savez_compressed(path, **arrays | {"log_ratios": np.broadcast_to(np.float16(0), (1 << 22,))})
        assert read_ratios(tmp_path, 1) is None
    np.savez(path, **arrays)
    data = path.read_bytes()
    stated = b"'shape': (3,), }"
    assert data.count(stated) == 1
    path.write_bytes(data.replace(stated + b" " * 12, b"'shape': (1099511627776,), }"[:28]))
    with within(megabytes=16):
        assert read_ratios(tmp_path, 1) is None
