"""What every room uses: devices and compilation, checks, progress, special functions."""
