"""Use of EXL3 models from other libraries; each is imported only when it is asked for."""
