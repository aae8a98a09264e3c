"""From what chains recorded to scores and their Monte Carlo errors; nothing here samples."""
