"""Chains: of the full data, of all folds side by side, and of the rungs between them."""
