"""The run page: shows a run's output in the browser, during the run and afterwards."""
