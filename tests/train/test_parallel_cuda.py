"""A sharded network with compiled blocks on one GPU: the steps of the network as it was before it was sharded. One rank
holds everything, since NCCL refuses two on a GPU; FSDP2's hooks and the graphs, with the experts' operator outside of
them, are those of several."""

import socket
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from m2forge.kernels.expert import expert_ffn
from m2forge.model.build import build
from m2forge.model.transformer import MixtureFFN, Transformer
from m2forge.train.config import MeshConfig, WalkConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.parallel import SINGLE_RANK, ProcessRanks, gathered, process_ranks, shard_model, sharded_modules
from tests.train.test_engine_cuda import OPTIMIZER, POLICY, over_rows, over_trees, tiny

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            patch.setenv(name, str(value))
        with process_ranks(torch.device("cuda"), MeshConfig()) as found:
            yield found


def stepped(model: Transformer, ranks: ProcessRanks | None, over: str, walk: WalkConfig | None) -> dict[str, Tensor]:
    """The optimizer's first moments, which are the gradients' of one step."""
    torch._dynamo.reset()
    if ranks is not None:
        shard_model(model, MeshConfig(shard="auto"), ranks)
        assert sharded_modules(model)
        for module in model.modules():
            if isinstance(module, MixtureFFN):
                module.expert_ffn = partial(expert_ffn)  # another operator, as several ranks have
        model.compile_blocks()
    engine = TrainEngine(model, OPTIMIZER, policy=POLICY, router_bias="balanced", walk=walk, ranks=ranks or SINGLE_RANK)
    (over_rows if over == "rows" else over_trees)(engine).read()
    slots = engine.optimizer.slots
    return {name: gathered(slot.tensors["mean"], slot.weight).double().cpu() for name, slot in slots.items()}


@pytest.mark.parametrize("walk", [None, WalkConfig(segment_tokens=128)], ids=["whole", "walk"])
@pytest.mark.parametrize("over", ["rows", "trees"])
def test_sharded_and_compiled_a_step_is_the_same(ranks: ProcessRanks, over: str, walk: WalkConfig | None) -> None:
    model, twin = (build(tiny(), seed=0, device="cuda") for _ in range(2))
    expected = stepped(twin, None, over, None)
    found = stepped(model, ranks, over, walk)
    assert expected.keys() == found.keys()
    for name, moment in expected.items():
        assert (found[name] - moment).norm() <= 1e-3 * moment.norm(), name
