"""Starts the processes of a run, on this machine or on others."""
