"""Small helpers that programs and the library share."""

from .misc import Timer, cuda_sync_active, prepend_hf_chat_context

__all__ = ["Timer", "cuda_sync_active", "prepend_hf_chat_context"]
