"""Runs the network on a batch.

In reading order: model_runner, decode, sampler; cpu_dtype; cuda_network, cuda_decode.
"""
