"""Which graph serves a batch."""

import pytest

from m2forge.rollout.execution.cuda_decode import PATIENCE, batch_size, serving_shape
from m2forge.rollout.execution.decode import Shape


def shape(num_sequences: int, depth: int = 1, num_blocks: int = 16, is_greedy: bool = True) -> Shape:
    return Shape(num_sequences, depth, depth, num_blocks, is_greedy, 8)


@pytest.mark.parametrize(("num", "padded"), [(1, 1), (3, 4), (64, 64), (65, 128), (129, 192), (256, 256)])
def test_batches_are_padded_to_a_few_sizes(num: int, padded: int) -> None:
    assert batch_size(num) == padded


def test_a_batch_that_shrinks_stays_in_the_next_larger_graph() -> None:
    captured = [shape(256), shape(64), shape(8, depth=3), shape(8, num_blocks=64), shape(8, is_greedy=False), shape(2)]
    assert serving_shape(shape(4), captured, 1) == shape(64)
    assert serving_shape(shape(128), captured, 1) == shape(256)


def test_a_batch_that_grows_gets_a_graph_of_its_own() -> None:
    assert serving_shape(shape(512), [shape(256)], 1) == shape(512)
    assert serving_shape(shape(4), [shape(8, depth=2)], 1) == shape(4)


def test_a_batch_that_comes_often_gets_one_too() -> None:
    assert serving_shape(shape(4), [shape(8)], PATIENCE) == shape(8)
    assert serving_shape(shape(4), [shape(8)], PATIENCE + 1) == shape(4)
