"""The fine-tuning stage: trajectories with interleaved thinking."""
