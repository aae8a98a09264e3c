"""Which rows each fold trains on and tests."""
