"""Worked examples, one file each."""
