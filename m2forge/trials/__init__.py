"""Trials: agents attempt tasks with a model that is not trained, several times each."""
