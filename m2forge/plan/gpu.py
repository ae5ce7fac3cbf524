"""GPUs: datasheet figures, and the rates that training reaches on them.

A GPU's `Datasheet` holds the vendor's figures. `Rates` are the throughput that a training step achieves: measured where
a line names the command and commit, otherwise estimated as the H200's measured share of the datasheet's peak, and
printed as an estimate.
"""

from dataclasses import dataclass, replace

from m2forge.errors import NotFoundError, suggest

GB = 10**9
NODE_GPUS = 8
"""GPUs of a node, which NVLink connects."""


@dataclass(frozen=True)
class Datasheet:
    memory: float
    """Bytes."""
    peak_flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    nvlink: float
    """Bytes per second to the other GPUs of a node, in one direction."""


DATASHEETS = {
    "A100": Datasheet(80 * GB, 312e12, 2.039e12, 300e9),
    "H100": Datasheet(80 * GB, 989e12, 3.35e12, 450e9),
    "H200": Datasheet(141 * GB, 989e12, 4.8e12, 450e9),
    "B200": Datasheet(180 * GB, 2250e12, 7.7e12, 900e9),
}
"""The vendor's figures of the SXM versions: memory, dense bfloat16 FLOPS, memory bandwidth, half of NVLink's total."""


@dataclass(frozen=True)
class Rates:
    """Throughput that a training step achieves."""

    dense: float
    """FLOPS of dense products."""
    expert: float
    """FLOPS of the experts' grouped products."""
    attention: float
    """FLOPS of attention over sequences of one length: products, and the softmax in units of them."""
    flex_attention: float
    """The same of FlexAttention, which packed documents and walks use; trees take about as long."""
    bandwidth: float
    """Bytes per second of memory-bound operations: norms, gates, sorting, optimizer."""
    block_s: float
    """Seconds in which the host launches a block's kernels, forward and backward: the least that a block takes."""
    origin: str
    """How the figures were found."""

    def scaled(self, to: Datasheet, of: Datasheet, origin: str) -> "Rates":
        """The same shares of another GPU's peak."""
        products, memory = to.peak_flops / of.peak_flops, to.bandwidth / of.bandwidth
        return replace(
            self,
            dense=self.dense * products,
            expert=self.expert * products,
            attention=self.attention * products,
            flex_attention=self.flex_attention * products,
            bandwidth=self.bandwidth * memory,
            origin=origin,
        )


MEASURED = {
    "H200": Rates(
        dense=737e12,
        expert=738e12,
        attention=938e12,
        flex_attention=714e12,
        bandwidth=2.56e12,
        block_s=2.54e-3,
        origin="fitted to the seventeen steps of benchmarks/scale.py --part plan, within 6.1%",
    )
}
"""Rates found by measurement, by GPU."""
REFERENCE = "H200"


@dataclass(frozen=True)
class Errors:
    """The largest errors of predictions for steps that were measured, relative to the measurement."""

    gpu: str
    """The GPU that ran the steps; it was one."""
    num_calibrating: int
    """Steps that the rates were fitted to."""
    num_tried: int
    """Other steps, predicted with these rates."""
    step_time: float
    """The largest of the tried steps."""
    memory: float
    """The largest of all steps; memory needs no calibration."""

    def describe(self, gpu: str, num_gpus: int) -> str:
        """The errors in words, and what of a plan for `num_gpus` of `gpu` was never measured."""
        unmeasured = [gpu] * (gpu != self.gpu) + ["more than one GPU"] * (num_gpus > 1)
        tried = f"{self.num_tried} steps, predicted from {self.num_calibrating} others"
        return (
            f"errors on one {self.gpu}: step time within {self.step_time:.1%} on {tried}, and peak memory within "
            f"{self.memory:.1%}" + (f"; never measured: {', '.join(unmeasured)}" if unmeasured else "")
        )


ERRORS = Errors(REFERENCE, num_calibrating=4, num_tried=13, step_time=0.103, memory=0.05)
"""What benchmarks/scale.py --part plan found in the run whose seventeen steps `MEASURED` is fitted to."""


@dataclass(frozen=True)
class GPU:
    name: str
    datasheet: Datasheet
    rates: Rates


def find_gpu(name: str) -> GPU:
    if name not in DATASHEETS:
        raise NotFoundError(f"unknown GPU {name!r}; {suggest(name, DATASHEETS)}")
    datasheet = DATASHEETS[name]
    if name in MEASURED:
        return GPU(name, datasheet, MEASURED[name])
    origin = f"estimated: the {REFERENCE}'s measured shares of the datasheet's peaks"
    return GPU(name, datasheet, MEASURED[REFERENCE].scaled(datasheet, DATASHEETS[REFERENCE], origin))
