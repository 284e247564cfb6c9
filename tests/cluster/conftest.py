from .vllm_engines import engines  # noqa: F401
