"""Terminal-Gym: questions about the command line become verified task folders."""
