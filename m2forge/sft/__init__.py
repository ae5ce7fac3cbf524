"""The SFT stage: trajectories with interleaved thinking."""
