"""Pipelines: raw material in, verified task folders and corpora for fine-tuning out."""
