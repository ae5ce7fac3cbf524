"""The pre-training stage: phases over a corpus."""
