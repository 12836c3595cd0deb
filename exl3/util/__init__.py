"""Small helpers that programs and the library share."""
