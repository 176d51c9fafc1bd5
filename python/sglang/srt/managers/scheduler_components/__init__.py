"""Small parts of the scheduler. Each knows its own job and holds no reference back to the scheduler."""
