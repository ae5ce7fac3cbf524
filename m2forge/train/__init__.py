"""The train engine: optimizers, schedules, losses, checkpoints, and the step over packed documents."""
