"""Languages of projects: one toolchain each."""
