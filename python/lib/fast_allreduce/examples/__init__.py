"""Programs that run: python -m fast_allreduce.examples.NAME."""
