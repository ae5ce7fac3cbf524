"""The paged KV cache.

In reading order: scheduler, block_pool, paged_plan.
"""
