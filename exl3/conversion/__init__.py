"""Converting Hugging Face and GGUF checkpoints to EXL3."""
