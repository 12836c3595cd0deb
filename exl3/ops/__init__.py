"""Typed wrappers of the compiled ops, each with its shape rule and a plain-torch reference."""
