"""Models written in other packages."""
