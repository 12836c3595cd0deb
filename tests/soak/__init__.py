"""A long run of many requests at once, and what must hold during and after it."""
