"""Task folders: instruction, environment, tests and solution as files, in the format of Harbor."""
