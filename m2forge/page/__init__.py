"""The run page: what a run has written, in the browser, while it runs and afterwards."""
