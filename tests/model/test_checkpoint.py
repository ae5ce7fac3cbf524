"""Model folders: what we save, transformers and we load; what does not fit is refused whole."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from m2forge.errors import CheckpointError, ExistsError, M2ForgeError
from m2forge.model.architecture import to_public
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.config import FamilyName, ModelConfig, WindowConfig
from m2forge.model.preset import PRESETS
from m2forge.model.safetensors_file import write_shards
from m2forge.model.tensor_source import TensorHeader
from m2forge.model.transformer import Transformer
from tests.conftest import FEW_CASES
from tests.forked import start
from tests.model.bias import set_biases
from tests.model.draw import FAMILIES, SMALL, model_configs

ROOT = Path(__file__).parent.parent.parent


def small_model(config: ModelConfig = SMALL, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    model = build(config, dtype=dtype, seed=seed)
    set_biases(model, std=0.1, seed=seed)
    return model


def assert_same_weights(one: Transformer, other: Transformer) -> None:
    """To the last bit, dtypes included."""
    state, other_state = one.state_dict(), other.state_dict()
    assert state.keys() == other_state.keys()
    for name, tensor in state.items():
        assert tensor.dtype == other_state[name].dtype, name
        assert torch.equal(tensor, other_state[name]), name


def transformers_can_express(config: ModelConfig) -> bool:
    try:
        to_public(config)
    except CheckpointError:
        return False
    # transformers refuses other llama shapes though it would compute them.
    return config.family != "llama" or config.hidden_size % config.attention.num_heads == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "nano"
    save_model(small_model(), folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A saved model to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


# -- whole folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@FEW_CASES
@given(data=st.data())
def test_transformers_computes_the_same_from_what_we_save(family: FamilyName, data: st.DataObject) -> None:
    num_mtp = data.draw(st.integers(0, 2))
    config = data.draw(model_configs(family, num_mtp=num_mtp).filter(transformers_can_express))
    seed = data.draw(st.integers(0, 2**20))
    model = small_model(config, seed=seed)
    tokens = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save_model(model, folder, max_shard_bytes=data.draw(st.sampled_from((4000, 10**9))))
        # Its grouped product wants aligned sizes; the plain loop takes any.
        peer = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
        again = load_model(folder)
    assert again.config == config
    assert_same_weights(again, model)
    with torch.no_grad():
        logits = model.logits(model(tokens).hidden_ND).view(2, 12, -1)
        expected = peer(tokens, use_cache=False).logits
    assert expected.dtype == torch.float32
    # float32 rounding over at most three layers of width 30.
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_shards_stay_below_their_size_and_the_index_lists_all(saved: Path, tmp_path: Path) -> None:
    max_shard_bytes = 1_500_000
    written = save_model(small_model(), tmp_path / "m", max_shard_bytes=max_shard_bytes)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    names = [f"model-{i:05d}-of-{written.num_files:05d}.safetensors" for i in range(1, written.num_files + 1)]
    assert written.num_files > 3
    assert sorted(path.name for path in (tmp_path / "m").glob("*.safetensors")) == names
    whole = load_file(saved / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == written.num_bytes == sum(t.nbytes for t in whole.values())
    for name in names:
        held = load_file(tmp_path / "m" / name)
        assert all(index["weight_map"][key] == name for key in held)
        assert sum(tensor.nbytes for tensor in held.values()) <= max_shard_bytes
    assert_same_weights(load_model(tmp_path / "m"), load_model(saved))


def test_weights_are_as_readable_as_the_folder(saved: Path) -> None:
    assert (saved / "model.safetensors").stat().st_mode & 0o777 == saved.stat().st_mode & 0o666


def test_the_dtype_can_be_changed_but_the_bias_stays_float32(tmp_path: Path) -> None:
    model = small_model(dtype=torch.bfloat16)
    save_model(model, tmp_path / "a")
    assert_same_weights(load_model(tmp_path / "a"), model)
    wide = load_model(tmp_path / "a", dtype=torch.float64)
    assert {tensor.dtype for tensor in wide.state_dict().values()} == {torch.float64}
    save_model(wide, tmp_path / "b", dtype=torch.bfloat16)
    assert_same_weights(load_model(tmp_path / "b"), model)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


def test_public_only_holds_nothing_of_ours(tmp_path: Path) -> None:
    model = small_model()
    save_model(model, tmp_path / "m", public_only=True)
    text = (tmp_path / "m" / "config.json").read_text()
    assert "m2forge" not in text
    assert not any("mtp" in name for name in load_file(tmp_path / "m" / "model.safetensors"))
    loaded = load_model(tmp_path / "m")
    assert loaded.config == SMALL.model_copy(update={"num_mtp": 0})
    main = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mtp.")}
    assert loaded.state_dict().keys() == main.keys()
    assert all(torch.equal(tensor, main[name]) for name, tensor in loaded.state_dict().items())


def test_a_network_the_family_cannot_express_is_saved_for_us(tmp_path: Path) -> None:
    attention = SMALL.attention.model_copy(update={"window": WindowConfig(size=8, layers=(0, 2), num_sinks=2)})
    model = small_model(SMALL.model_copy(update={"attention": attention}))
    with pytest.raises(CheckpointError, match=r"cannot express attention\.window"):
        save_model(model, tmp_path / "public", public_only=True)
    assert list(tmp_path.iterdir()) == []
    save_model(model, tmp_path / "m")
    loaded = load_model(tmp_path / "m")
    assert loaded.config == model.config
    assert_same_weights(loaded, model)
    # transformers would compute something else without the window; it must not try.
    with pytest.raises(ValueError, match="m2forge"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_a_change_by_another_program_is_noticed(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["rms_norm_eps"] = 0.1
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"disagree on norm_eps.*remove the key 'm2forge'"):
        load_model(copy)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_every_misfit_is_named_in_one_error(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    del tensors["model.layers.2.block_sparse_moe.experts.3.w2.weight"]
    tensors["model.layers.9.extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.ones(7)
    tensors["lm_head.weight"] = torch.zeros(512, 128, dtype=torch.int8)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(copy)
    message = str(caught.value)
    assert message.startswith(f"{copy}: 5 tensors do not fit")
    for line in (
        "missing: model.layers.1.self_attn.k_proj.weight, shape [64, 128]",
        "missing: model.layers.2.block_sparse_moe.experts.3.w2.weight, shape [128, 128]",
        "extra: model.layers.9.extra.weight, shape [3]",
        "misshapen: model.norm.weight has shape [7], expected [128]",
        "unusable: lm_head.weight is stored as I8; expected one of",
    ):
        assert line in message


def test_a_long_list_of_misfits_is_cut_and_counted(copy: Path) -> None:
    save_file({"model.norm.weight": torch.ones(128)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(copy)
    assert "missing: … and " in str(caught.value)
    assert len(str(caught.value).splitlines()) < 25


def test_redundant_tensors_of_older_exporters_are_tolerated(tmp_path: Path) -> None:
    config = SMALL.model_copy(update={"tied_head": True})
    model = small_model(config)
    save_model(model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(512, 128)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert_same_weights(load_model(tmp_path / "m"), model)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def fill_with_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index_absent_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_outside(folder: Path) -> None:
    index = {"weight_map": {"a": "../saved/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["m2forge"]
        config = {key: value for key, value in (config | changes).items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model\.safetensors is not a complete safetensors file"),
        (cut_header, r"model\.safetensors is not a complete safetensors file"),
        (fill_with_garbage, r"model\.safetensors is not a complete safetensors file"),
        (drop_weights, r"holds neither model\.safetensors nor"),
        (index_absent_shard, r"lacks model-00002-of-00002\.safetensors"),
        (index_outside, r"names files outside the folder"),
        (break_index, r"index\.json has no weight_map"),
        (break_config, r"config\.json cannot be read as JSON"),
        (list_config, r"config\.json holds a JSON list"),
        (drop_config, r"config\.json does not exist"),
        (change_config(vocab_size="absent"), r"config\.json: the key 'vocab_size' is missing"),
        (change_config(hidden_size="wide"), r"config\.json: invalid value"),
        (change_config(num_attention_heads=0), r"config\.json: invalid value"),
        (change_config(model_type="lama"), r"config\.json: model_type 'lama' is not supported; did you mean 'llama'"),
        (change_config(quantization_config={"quant_method": "gptq"}), r"quantised by 'gptq'.* not supported"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        load_model(copy)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(M2ForgeError, match="is not a folder"):
        load_model(tmp_path / "absent")


# -- nothing half-written ---------------------------------------------------------------------------------------------


def test_a_failing_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, write = set[int](), os.pwrite

    def fail_in_second(descriptor: int, content: bytes, start: int) -> int:
        files.add(os.fstat(descriptor).st_ino)
        if len(files) >= 2 and start:
            raise OSError("disk full")
        return write(descriptor, content, start)

    monkeypatch.setattr(os, "pwrite", fail_in_second)
    with pytest.raises(OSError, match="disk full"):
        save_model(small_model(), tmp_path / "m", max_shard_bytes=1_000_000)
    assert len(files) >= 2
    assert list(tmp_path.iterdir()) == []


def test_written_files_are_those_of_the_format(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "wide": torch.randn(2, 5, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "turned": torch.randn(4, 3).T,
    }
    headers = {name: TensorHeader(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_shards(tmp_path, headers, lambda name, _: tensors[name], 1 << 30)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_an_occupied_destination_is_refused_untouched(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ExistsError, match="not empty"):
        save_model(load_model(saved), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def save_and_die(folder: Path) -> None:
    """Killed while the third shard is written."""
    files, write = set[int](), os.pwrite

    def save(descriptor: int, content: bytes, start: int) -> int:
        files.add(os.fstat(descriptor).st_ino)
        if len(files) >= 3 and start:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, content, start)

    setattr(os, "pwrite", save)  # noqa: B010  (in a process of its own)
    save_model(build(PRESETS["m2-nano"]), folder, max_shard_bytes=10**6)


def test_a_killed_save_leaves_no_destination(tmp_path: Path) -> None:
    process = start(save_and_die, tmp_path / "m")
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "m").exists()
    assert all(path.name.endswith(".partial") for path in tmp_path.iterdir())


# -- memory -----------------------------------------------------------------------------------------------------------

MEASURE_LOAD = """
import sys, threading, time
from pathlib import Path
import torch
from m2forge.model.checkpoint import load_model

def anonymous_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def share(folder):
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder)
    done.set()
    watcher.join()
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    return (max(peak, anonymous_bytes()) - before) / held, model

load_model(Path(sys.argv[1]))  # what importing and first use cost is not the load's
loaded = [share(Path(folder)) for folder in sys.argv[2:]]  # all are held: memory that is free again would not show
print(*(found for found, _ in loaded))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_model(saved: Path, tmp_path: Path) -> None:
    config = SMALL.model_copy(update={"hidden_size": 1024, "vocab_size": 16_384, "num_mtp": 0})
    model, folders = build(config, dtype=torch.bfloat16), [tmp_path / "bfloat16", tmp_path / "float32"]
    for folder in folders:
        save_model(model, folder, dtype=getattr(torch, folder.name), max_shard_bytes=50_000_000)
    command = [sys.executable, "-c", MEASURE_LOAD, str(saved), *map(str, folders)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shares = [float(word) for word in result.stdout.split()]
    assert len(shares) == 2
    assert all(0.9 < share < 1.2 for share in shares), shares
