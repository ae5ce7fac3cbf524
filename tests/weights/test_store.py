"""A version is whole or not there, means one state of the weights, and the newest few are kept."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from m2forge.errors import ConfigError, ExistsError
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model
from m2forge.model.delta import is_delta_folder
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion
from m2forge.weights.store import WeightStore


def make_model() -> Transformer:
    torch.manual_seed(0)
    return build(preset("m2-nano").with_layers(1), torch.device("cpu"), torch.float32)


def test_the_newest_is_what_was_published_last(tmp_path: Path) -> None:
    store, model = WeightStore(tmp_path / "weights", "run", keep=2), make_model()
    assert store.newest() is None
    for step in (0, 1, 5):
        with torch.no_grad():
            model.norm.weight.fill_(float(step))
        store.publish(model, step)
    found = store.newest()
    assert found is not None
    version, folder = found
    assert version == PolicyVersion("run", 5, store.branch)
    assert (load_model(folder).norm.weight == 5).all()
    names = [f"step-00000001-{store.branch}", f"step-00000005-{store.branch}"]
    assert sorted(path.name for path in store.folder.iterdir()) == names


def test_companions_lie_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    store = WeightStore(tmp_path / "weights", "run", companions=(tmp_path / "tokenizer.json",))
    assert (store.publish(make_model(), 1) / "tokenizer.json").read_text() == "{}"


def test_a_version_means_one_state_until_the_trainer_went_back(tmp_path: Path) -> None:
    store, model = WeightStore(tmp_path / "weights", "run", keep=5), make_model()
    for step in (1, 2, 3):
        store.publish(model, step)
    with pytest.raises(ExistsError):
        store.publish(model, 3)
    store.discard_after(1)
    assert store.newest() == (PolicyVersion("run", 1, store.branch), store.folder / f"step-00000001-{store.branch}")
    store.publish(model, 2)


def test_a_step_republished_after_going_back_is_another_version(tmp_path: Path) -> None:
    lost, again, model = (
        WeightStore(tmp_path / "weights", "run"),
        WeightStore(tmp_path / "weights", "run"),
        make_model(),
    )
    lost.publish(model, 4)
    folder = lost.publish(model, 5)
    with pytest.raises(ExistsError, match="step 5"):
        again.publish(model, 5)
    before = again.newest()
    again.discard_after(4)
    assert again.newest() == (
        PolicyVersion("run", 4, lost.branch),
        tmp_path / "weights" / f"step-00000004-{lost.branch}",
    )
    again.publish(model, 5)
    after = lost.newest()
    assert before == (PolicyVersion("run", 5, lost.branch), folder)
    assert after is not None
    assert after[0] == PolicyVersion("run", 5, again.branch) != before[0]
    assert after[1] != folder


def test_a_folder_without_a_branch_is_a_version(tmp_path: Path) -> None:
    """Earlier releases published those."""
    store = WeightStore(tmp_path / "weights", "run")
    store.publish(make_model(), 3).rename(store.folder / "step-00000003")
    assert store.newest() == (PolicyVersion("run", 3), store.folder / "step-00000003")


def test_strange_folders_are_left_alone(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "run", keep=1)
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "step-by-step" / "notes").write_text("")
    store.publish(make_model(), 1)
    assert store.newest() is not None
    assert (tmp_path / "step-by-step" / "notes").exists()


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep"):
        WeightStore(tmp_path, "run", keep=0)


def test_versions_stay_while_kept_ones_build_on_them(tmp_path: Path) -> None:
    store, model = WeightStore(tmp_path / "weights", "run", keep=2, anchor_every=3), make_model()
    present = []
    for step in range(6):
        with torch.no_grad():
            model.norm.weight.fill_(float(step))
        folder = store.publish(model, step)
        assert is_delta_folder(folder) == (step % 3 > 0)
        assert (load_model(folder).norm.weight == step).all()
        present.append([int(path.name.split("-")[1]) for path in sorted(store.folder.iterdir())])
    assert present == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5]]
    store.discard_after(4)
    assert not is_delta_folder(store.publish(model, 5)), "after going back the first version is whole"


def publish_forever(folder: Path, output: int, anchor_every: int) -> None:
    torch.set_num_threads(1)  # torch's threads do not live in a forked process
    store, model = WeightStore(folder, "run", anchor_every=anchor_every), make_model()
    newest = store.newest()
    for step in itertools.count(1 + (newest[0].step if newest else 0)):
        with torch.no_grad():
            model.norm.weight.fill_(float(step))
        store.publish(model, step)
        os.write(output, f"{step}\n".encode())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("anchor_every", [1, 2])
def test_a_publisher_killed_at_any_moment_leaves_whole_versions(tmp_path: Path, anchor_every: int) -> None:
    store, last = WeightStore(tmp_path / "weights", "run"), 0
    for delay_s in (0.0, 0.011, 0.023):
        source, output = os.pipe()
        process = os.fork()
        if not process:
            try:
                publish_forever(store.folder, output, anchor_every)
            finally:
                os._exit(1)
        os.close(output)
        with os.fdopen(source) as lines:
            published = int(lines.readline())
            time.sleep(delay_s)
            os.kill(process, signal.SIGKILL)
            published = max([published, *map(int, lines.read().split())])
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        found = store.newest()
        assert found is not None
        version, folder = found
        assert version.step >= published > last
        assert (load_model(folder).norm.weight == version.step).all()
        last = version.step
    store.publish(make_model(), last + 1)
    assert not list(store.folder.glob(".*"))
    assert len(list(store.folder.iterdir())) <= 1 + anchor_every
